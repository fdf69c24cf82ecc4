"""JSON Schemas (draft 2020-12) of what an artifact's manifest and tensor list hold.

They describe the format for other programs and for tests; reading does not use them.
"""
