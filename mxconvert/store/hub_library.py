"""huggingface_hub: found or asked for, kept quiet, and its errors turned into ours."""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mxconvert.errors import MissingExtraError, MxConvertError, StoreError, StoreFault

if TYPE_CHECKING:
    from collections.abc import Iterator

_BY_STATUS = {
    400: StoreFault.REFUSED,
    401: StoreFault.DENIED,
    403: StoreFault.DENIED,
    404: StoreFault.MISSING,
    408: StoreFault.TRANSIENT,
    409: StoreFault.CHANGED,
    412: StoreFault.CHANGED,
    429: StoreFault.THROTTLED,
    503: StoreFault.THROTTLED,
}
# By name, along the bases: the classes move between releases, and their parents differ.
_BY_NAME = {
    "GatedRepoError": StoreFault.DENIED,
    "DisabledRepoError": StoreFault.DENIED,
    "RepositoryNotFoundError": StoreFault.NO_BUCKET,
    "RevisionNotFoundError": StoreFault.MISSING,
    "EntryNotFoundError": StoreFault.MISSING,
    "LocalTokenNotFoundError": StoreFault.NO_CREDENTIALS,
    "HFValidationError": StoreFault.REFUSED,
    "OfflineModeIsEnabled": StoreFault.REFUSED,
}
_OF_THE_LINE = {
    "TimeoutException": StoreFault.STALLED,
    "Timeout": StoreFault.STALLED,
    "TimeoutError": StoreFault.STALLED,
    "TransportError": StoreFault.TRANSIENT,
    "RequestException": StoreFault.TRANSIENT,
    "ConnectionError": StoreFault.TRANSIENT,
    "OSError": StoreFault.TRANSIENT,
}
_HINTS = {
    StoreFault.NO_BUCKET: "check the name; a private repository needs `hf auth login` or "
    "HF_TOKEN, and mxconvert creates none",
    StoreFault.DENIED: "run `hf auth login` or set HF_TOKEN, and accept the model's terms on "
    "its page if it has some",
    StoreFault.NO_CREDENTIALS: "run `hf auth login` or set HF_TOKEN",
}
_QUERY = re.compile(r"\?[^\s)\"']+")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")
_SERVER_ERROR = 500


def library() -> Any:
    """Return huggingface_hub, which neither draws bars nor writes warnings from now on.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.utils")  # the package loads its parts late
    except ImportError as error:
        raise MissingExtraError(
            "hf:// needs huggingface_hub, which is not installed",
            hint="run: pip install 'mxconvert[hf]'",
        ) from error
    hub.utils.disable_progress_bars()
    hub.utils.logging.set_verbosity_error()
    return hub


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into `StoreError` about ``where``."""
    try:
        yield
    except MxConvertError:
        raise
    except Exception as error:
        raise _explained(error, where) from error


def _explained(error: Exception, where: str) -> StoreError:
    chain = list(_chain(error))
    fault = next(filter(None, map(_fault, chain)), StoreFault.REFUSED)
    texts = dict.fromkeys(" ".join(str(each).split()) for each in (error, chain[-1]))
    text = ": ".join(filter(None, texts))
    what = _TOKEN.sub("hf_***", _QUERY.sub("?...", text)) or type(error).__name__
    return StoreError(
        fault, f"{where}: {what}", hint=_HINTS.get(fault), retry_after=_seconds(chain)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _fault(error: BaseException) -> StoreFault | None:
    names = [base.__name__ for base in type(error).__mro__]
    by_name = next((_BY_NAME[name] for name in names if name in _BY_NAME), None)
    if by_name is not None:
        return by_name
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        other = StoreFault.TRANSIENT if status >= _SERVER_ERROR else StoreFault.REFUSED
        return _BY_STATUS.get(status, other)
    return next((_OF_THE_LINE[name] for name in names if name in _OF_THE_LINE), None)


def _seconds(chain: list[BaseException]) -> float | None:
    for error in chain:
        headers: Any = getattr(getattr(error, "response", None), "headers", None) or {}
        text = str(headers.get("retry-after") or "")
        if text.isdigit():
            return float(text)
    return None
