"""From what fsspec's many file systems raise to `StoreError`."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto

from mxconvert.errors import MxConvertError, StoreError, StoreFault
from mxconvert.store.s3.faults import from_response, translated

if TYPE_CHECKING:
    from collections.abc import Iterator

_BY_STATUS = {
    401: StoreFault.DENIED,
    403: StoreFault.DENIED,
    404: StoreFault.MISSING,
    405: StoreFault.UNSUPPORTED,
    408: StoreFault.TRANSIENT,
    409: StoreFault.CHANGED,
    410: StoreFault.MISSING,
    412: StoreFault.CHANGED,
    425: StoreFault.TRANSIENT,
    429: StoreFault.THROTTLED,
    501: StoreFault.UNSUPPORTED,
    503: StoreFault.THROTTLED,
}
_BY_ERRNO = {
    errno.ENOENT: StoreFault.MISSING,
    errno.EACCES: StoreFault.DENIED,
    errno.EPERM: StoreFault.DENIED,
    errno.EROFS: StoreFault.DENIED,
    errno.EBUSY: StoreFault.THROTTLED,
    errno.ENOSPC: StoreFault.REFUSED,
    errno.EDQUOT: StoreFault.REFUSED,
    errno.EINVAL: StoreFault.REFUSED,
    errno.ENAMETOOLONG: StoreFault.REFUSED,
    errno.ENOSYS: StoreFault.UNSUPPORTED,
    errno.EOPNOTSUPP: StoreFault.UNSUPPORTED,
}
_BY_NAME = {
    # Of libraries that need not be installed.
    "AuthenticationException": StoreFault.DENIED,
    "BadHostKeyException": StoreFault.DENIED,
    "PasswordRequiredException": StoreFault.NO_CREDENTIALS,
    "SSHException": StoreFault.TRANSIENT,
    "ClientError": StoreFault.TRANSIENT,
    "LogonFailure": StoreFault.DENIED,
}
_HINTS = {
    StoreFault.DENIED: "check the credentials; the store's own are given as --store-option",
    StoreFault.UNSUPPORTED: "this store cannot do it; use another one",
}
_SERVER_ERROR = 500


@contextmanager
def explained(where: str, secret: str | None) -> Iterator[None]:
    """Turn whatever is raised into `StoreError` about ``where``, without ``secret``."""
    try:
        yield
    except MxConvertError:
        raise
    except Exception as error:
        found = _explain(error, where)
        if secret:
            found.message = found.message.replace(secret, "***")
            found.args = (found.message,)
        raise found from error


def _explain(error: Exception, where: str) -> StoreError:
    chain = list(_chain(error))
    for each in chain:
        if isinstance(each, boto.ClientError):
            return from_response(each.response, where)
        if isinstance(each, boto.BotoCoreError):
            return _of_botocore(each, where)
    fault = next(filter(None, map(_fault, reversed(chain))), StoreFault.REFUSED)
    text = str(error) if isinstance(error, OSError) and error.errno else str(chain[-1])
    what = f"{where}: {text or type(chain[-1]).__name__}"
    return StoreError(fault, what, hint=_HINTS.get(fault))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it, the last cause last."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _of_botocore(error: boto.BotoCoreError, where: str) -> StoreError:
    try:
        with translated(where):
            raise error  # noqa: TRY301  (what translates it is a context)
    except StoreError as found:
        return found
    except Exception as found:  # noqa: BLE001  (whatever it is, it has no better name)
        return StoreError(StoreFault.REFUSED, f"{where}: {found}")


def _fault(error: BaseException) -> StoreFault | None:
    status: Any = getattr(error, "status", None)
    if isinstance(status, int) and status:
        other = StoreFault.TRANSIENT if status >= _SERVER_ERROR else StoreFault.REFUSED
        return _BY_STATUS.get(status, other)
    for base in type(error).__mro__:
        if base.__name__ in _BY_NAME:
            return _BY_NAME[base.__name__]
    return _builtin(error)


def _builtin(error: BaseException) -> StoreFault | None:
    faults: tuple[tuple[tuple[type[BaseException], ...], StoreFault], ...] = (
        ((FileExistsError,), StoreFault.CHANGED),
        ((FileNotFoundError, NotADirectoryError, IsADirectoryError), StoreFault.MISSING),
        ((PermissionError,), StoreFault.DENIED),
        ((TimeoutError,), StoreFault.STALLED),
        ((NotImplementedError,), StoreFault.UNSUPPORTED),
        ((EOFError,), StoreFault.TRANSIENT),
    )
    for types, fault in faults:
        if isinstance(error, types):
            return fault
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, StoreFault.TRANSIENT)
    return None
