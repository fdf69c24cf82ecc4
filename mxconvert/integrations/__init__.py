"""Thin adapters through which engines read artifacts; each imports its engine when called."""
