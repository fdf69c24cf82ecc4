"""From botocore's exceptions to `StoreError`."""

from __future__ import annotations

import time
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3 import exceptions as http

from mxconvert.errors import MxConvertError, StoreError, StoreFault, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_THROTTLED = frozenset(
    {
        "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded",
        "TooManyRequests", "ServiceUnavailable", "BandwidthLimitExceeded", "429", "503",
    }
)  # fmt: skip
_EXPIRED = frozenset({"ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException"})
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired", "AuthFailure.Clock"})
_TRANSIENT = frozenset(
    {
        "InternalError", "RequestTimeout", "RequestTimeoutException", "OperationAborted",
        "IncompleteBody", "500", "502", "504",
    }
)  # fmt: skip
_DENIED = frozenset(
    {
        "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch",
        "AccountProblem", "InvalidToken", "Forbidden", "Unauthorized", "401", "403",
    }
)  # fmt: skip
_MISSING = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound", "404", "NoSuchUpload"})
_CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_CORRUPT = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
_UNSUPPORTED = frozenset({"NotImplemented", "501", "InvalidArgument.Checksum"})
_BAD_PARTS = frozenset({"InvalidPart", "InvalidPartOrder"})
_BY_CODE: Mapping[str, StoreFault] = {
    code: fault
    for codes, fault in (
        (_THROTTLED, StoreFault.THROTTLED),
        (_EXPIRED, StoreFault.EXPIRED),
        (_SKEWED, StoreFault.SKEWED),
        (_TRANSIENT, StoreFault.TRANSIENT),
        (_DENIED, StoreFault.DENIED),
        (_MISSING, StoreFault.MISSING),
        (_CHANGED | _BAD_PARTS, StoreFault.CHANGED),
        (_CORRUPT, StoreFault.CORRUPT),
        (_UNSUPPORTED, StoreFault.UNSUPPORTED),
        (frozenset({"NoSuchBucket"}), StoreFault.NO_BUCKET),
    )
    for code in codes
}
_HINTS: Mapping[StoreFault, str] = {
    StoreFault.DENIED: "check the credentials and the bucket's policy; for a public bucket "
    "pass --store-option anonymous=true",
    StoreFault.NO_CREDENTIALS: "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
    "for a public bucket pass --store-option anonymous=true",
    StoreFault.EXPIRED: "renew the credentials and run the same command again; it goes on "
    "where it stopped",
    StoreFault.NO_BUCKET: "create the bucket or check its name; mxconvert creates none",
    StoreFault.SKEWED: "set this machine's clock",
    StoreFault.UNSUPPORTED: "if the store does not know the newer checksums, pass "
    "--checksum when-required",
}
_TLS = "CERTIFICATE_VERIFY_FAILED"
_SERVER_ERROR, _REDIRECT = 500, 300


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn what botocore and urllib3 raise into `StoreError` about ``where``."""
    try:
        yield
    except boto.ClientError as error:
        raise from_response(error.response, where) from error
    except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
        raise _error(StoreFault.NO_CREDENTIALS, where, "no credentials were found") from error
    except (boto.CredentialRetrievalError, boto.SSOTokenLoadError) as error:
        raise _error(StoreFault.NO_CREDENTIALS, where, str(error)) from error
    except (boto.UnauthorizedSSOTokenError, boto.TokenRetrievalError) as error:
        raise _error(StoreFault.EXPIRED, where, str(error)) from error
    except (boto.ReadTimeoutError, boto.ConnectTimeoutError, http.TimeoutError) as error:
        raise _error(StoreFault.STALLED, where, "no byte came in time") from error
    except boto.FlexibleChecksumError as error:
        raise _error(StoreFault.CORRUPT, where, _checksums(error)) from error
    except (boto.IncompleteReadError, ResponseParserError) as error:
        raise _error(StoreFault.TRANSIENT, where, "the answer ended early") from error
    except (boto.HTTPClientError, boto.ConnectionError, http.HTTPError, OSError) as error:
        _raise_own(error)
        raise _of_the_line(error, where) from error
    except boto.ParamValidationError as error:
        raise UsageError(f"{where}: {error}", code="bad-url") from error


def _raise_own(error: Exception) -> None:
    """Raise what a body that was being sent has raised, and botocore has wrapped."""
    inner = getattr(error, "kwargs", {}).get("error")
    if isinstance(inner, MxConvertError):
        raise inner


def from_response(response: Mapping[str, Any], where: str) -> StoreError:
    """Return the error for an S3 error response."""
    error = response.get("Error", {})
    code, text = str(error.get("Code", "")), str(error.get("Message") or "")
    meta = response.get("ResponseMetadata", {})
    status, headers = int(meta.get("HTTPStatusCode", 0)), meta.get("HTTPHeaders", {})
    fault = _BY_CODE.get(code) or _by_status(status)
    if fault is StoreFault.REFUSED and "hecksum" in text + code and code not in _BAD_PARTS:
        fault = StoreFault.UNSUPPORTED
    what = f"the store answered {status} {code}".rstrip()
    if text and text != code:
        what += f": {text.rstrip('.')}"
    if fault is StoreFault.SKEWED:
        own = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        what += f"; this machine says {own} UTC, the store {headers.get('date', 'nothing')}"
    if fault is StoreFault.EXPIRED:
        what = f"the credentials have expired ({what})"
    return _error(fault, where, what, _seconds(headers.get("retry-after")))


def _by_status(status: int) -> StoreFault:
    fault = _BY_CODE.get(str(status))
    if fault is not None:
        return fault
    return StoreFault.TRANSIENT if status >= _SERVER_ERROR else StoreFault.REFUSED


def _error(
    fault: StoreFault, where: str, what: str, retry_after: float | None = None
) -> StoreError:
    return StoreError(fault, f"{where}: {what}", hint=_HINTS.get(fault), retry_after=retry_after)


def _of_the_line(error: Exception, where: str) -> StoreError:
    if isinstance(error, boto.SSLError | http.SSLError) and _TLS in str(error):
        return StoreError(
            StoreFault.REFUSED,
            f"{where}: the server's certificate cannot be verified",
            hint="pass --store-option ca_bundle=FILE with the authority's certificate",
        )
    return _error(StoreFault.TRANSIENT, where, _reason(error))


def _checksums(error: Exception) -> str:
    """Say in our words what botocore has found."""
    text = str(error).replace("Expected checksum", "expected checksum")
    text = text.replace(" did not match calculated checksum:", ", found")
    return f"other bytes came than the store has a checksum of: {text}"


def _reason(error: BaseException) -> str:
    """Return the innermost reason, without the URL with its query that wraps it.

    What an error wraps may itself have come up while that error was handled: a ring.
    """
    inner, seen = error, {id(error)}
    while True:
        nested = getattr(inner, "kwargs", {}).get("error") or inner.__cause__ or inner.__context__
        if nested is None or id(nested) in seen:
            break
        inner = nested
        seen.add(id(inner))
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return str(inner) or type(inner).__name__


def _seconds(text: str | None) -> float | None:
    """Read a Retry-After header: seconds, or an HTTP date."""
    if text is None:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
