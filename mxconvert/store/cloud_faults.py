"""From obstore's exceptions to `StoreError`."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from obstore import exceptions as obstore

from mxconvert.errors import StoreError, StoreFault

if TYPE_CHECKING:
    from collections.abc import Iterator

_BY_CLASS = (
    (obstore.AlreadyExistsError, StoreFault.CHANGED),
    (obstore.PreconditionError, StoreFault.CHANGED),
    (obstore.NotModifiedError, StoreFault.CHANGED),
    (obstore.NotFoundError, StoreFault.MISSING),
    (FileNotFoundError, StoreFault.MISSING),
    (FileExistsError, StoreFault.CHANGED),
    (obstore.PermissionDeniedError, StoreFault.DENIED),
    (obstore.UnauthenticatedError, StoreFault.DENIED),
    (obstore.NotSupportedError, StoreFault.UNSUPPORTED),
    (NotImplementedError, StoreFault.UNSUPPORTED),
    (obstore.InvalidPathError, StoreFault.REFUSED),
    (TimeoutError, StoreFault.STALLED),
)
# In this order: the first that occurs in the text decides.
_BY_TEXT = (
    (r"NoSuchBucket|bucket does not exist|ContainerNotFound|container does not exist",
     StoreFault.NO_BUCKET),
    (r"ExpiredToken|token (has )?expired|Signature not valid in the specified time frame",
     StoreFault.EXPIRED),
    (r"RequestTimeTooSkewed", StoreFault.SKEWED),
    (r"metadata\.google\.internal|169\.254\.169\.254|[Nn]o credentials",
     StoreFault.NO_CREDENTIALS),
    (r"\b429\b|\b503\b|ServerBusy|SlowDown|TooManyRequests|rateLimitExceeded",
     StoreFault.THROTTLED),
    (r"Md5Mismatch|BadDigest|Crc64Mismatch", StoreFault.CORRUPT),
    (r"timed out|TimedOut|OperationTimedOut", StoreFault.STALLED),
    (r"\b(408|425|500|502|504)\b", StoreFault.TRANSIENT),
    (r"\b412\b|\b409\b", StoreFault.CHANGED),
    (r"\b416\b", StoreFault.REFUSED),
    (r"\b501\b", StoreFault.UNSUPPORTED),
    (r"\b40[13]\b", StoreFault.DENIED),
    (r"\b4\d\d\b", StoreFault.REFUSED),
    (r"MissingVersion|MissingETag", StoreFault.UNSUPPORTED),
    (r"error sending request|HTTP error|error decoding|connection|body error",
     StoreFault.TRANSIENT),
)  # fmt: skip
_HINTS = {
    StoreFault.DENIED: "check the credentials and the access policy; for public objects pass "
    "--store-option anonymous=true",
    StoreFault.NO_CREDENTIALS: "set the provider's variables, such as "
    "GOOGLE_APPLICATION_CREDENTIALS or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY; for public objects pass --store-option anonymous=true",
    StoreFault.EXPIRED: "renew the credentials and run the same command again; it goes on "
    "where it stopped",
    StoreFault.NO_BUCKET: "create the bucket or container, or check its name; mxconvert "
    "creates none",
}
_QUERY = re.compile(r"\?[^\s)\"']+")
_LONGEST = 400


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn what obstore raises into `StoreError` about ``where``."""
    try:
        yield
    except (obstore.BaseError, OSError, NotImplementedError) as error:
        raise explained(error, where) from error


def explained(error: Exception, where: str) -> StoreError:
    """Return the error for one of obstore's; queries of URLs, which may sign, are left out."""
    text = str(error)
    fault = _fault(error, text)
    what = _QUERY.sub("?...", text.partition("\n\nDebug source")[0])
    what = " ".join(what.split())
    if len(what) > _LONGEST:
        what = f"{what[:_LONGEST]}..."
    return StoreError(fault, f"{where}: {what}", hint=_HINTS.get(fault))


def _fault(error: Exception, text: str) -> StoreFault:
    by_text = next((fault for pattern, fault in _BY_TEXT if re.search(pattern, text)), None)
    if by_text in (StoreFault.NO_BUCKET, StoreFault.EXPIRED, StoreFault.SKEWED):
        return by_text
    by_class = (fault for kind, fault in _BY_CLASS if isinstance(error, kind))
    return next(by_class, by_text or StoreFault.REFUSED)
