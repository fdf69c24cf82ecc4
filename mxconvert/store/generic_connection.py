"""fsspec's file systems: found by scheme, made when needed, dropped when the line is gone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from fsspec import get_filesystem_class
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import known_implementations

from mxconvert.errors import MissingExtraError, UsageError
from mxconvert.store.generic_options import storage_options

if TYPE_CHECKING:
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

WEB = frozenset({"http", "https"})
WITH_FOLDERS = frozenset(
    {
        "arrow_hdfs", "dav", "davs", "dbfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav",
        "webdavs", "webhdfs",
    }
)  # fmt: skip
"""Schemes of real file systems: folders are made, and a file can be renamed."""

_PACKAGES = {"sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "hdfs": "pyarrow"}


class Connection:
    """Makes the file system of a URL, for each thread its own where threads cannot share it.

    Attributes:
        path: The URL's path as the file system writes it.
        shown: The URL without a password.
        secret: The password in the URL.
    """

    def __init__(self, url: StoreURL, options: StoreOptions) -> None:
        self.scheme = url.scheme
        self._class = _class(url.scheme)
        text = str(url)
        host = urlsplit(text) if "@" in text.split("/")[2] else None
        self.secret = host.password if host else None
        self.shown = text.replace(f":{self.secret}@", "@", 1) if self.secret else text
        # What is typed of a web address is quoted already, as far as it has to be.
        text = quote(text, safe="/:@%?&=+~!$'()*,;[]") if url.scheme in WEB else text
        self.path = str(self._class._strip_protocol(text))  # noqa: SLF001  (fsspec's own way)
        known = self._class._get_kwargs_from_urls(text)  # noqa: SLF001
        self._options = {**known, **storage_options(options, url.scheme)}
        self._lock = threading.Lock()
        shared = url.scheme == "memory" or issubclass(self._class, AsyncFileSystem)
        self._held: Any = _Held() if shared else threading.local()

    def system(self) -> Any:
        """Return the file system.

        Raises:
            UsageError: An option that it does not take.
            MissingExtraError: It needs a package that is not installed.
        """
        with self._lock:
            if getattr(self._held, "system", None) is None:
                self._held.system = self._make()
            return self._held.system

    def drop(self) -> None:
        """Make the next call of `system` connect anew."""
        with self._lock:
            self._held.system = None

    def _make(self) -> Any:
        try:
            system = self._class(
                use_listings_cache=False, skip_instance_cache=True, **self._options
            )
        except (TypeError, KeyError) as error:
            raise UsageError(f"{self.shown}: {error}", code="bad-store-option") from error
        except ImportError as error:
            raise _missing(self.scheme, error) from error
        if self.scheme == "s3":
            system.retries = 1
        return system


class _Held:
    """What all threads share."""


def _class(scheme: str) -> Any:
    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        raise _missing(scheme, error) from error
    except ValueError as error:
        raise UsageError(
            f"{scheme}://: no such kind of store",
            hint="known are s3, gs, az, hf, file, http and what fsspec has a package for",
            code="unknown-scheme",
        ) from error


def _missing(scheme: str, error: ImportError) -> MissingExtraError:
    package = _PACKAGES.get(scheme) or error.name
    entry: Any = known_implementations.get(scheme, {})
    hint = f"run: pip install {package}" if package else str(entry.get("err") or error)
    return MissingExtraError(f"{scheme}:// needs a package that is not installed", hint=hint)
