"""Amazon S3 and what speaks its protocol, through botocore from our own threads."""

from mxconvert.store.s3.store import S3Store

__all__ = ["S3Store"]
