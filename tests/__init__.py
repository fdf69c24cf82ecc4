"""Tests of mxconvert. `tests.support` is their shared base."""
