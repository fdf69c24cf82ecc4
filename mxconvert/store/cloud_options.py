"""From ``--store-option`` to obstore's stores of Google Cloud Storage and Azure."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore

from mxconvert.errors import LocalError, UsageError

if TYPE_CHECKING:
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

OWN_OPTIONS = frozenset(
    {"anonymous", "ca_bundle", "connect_timeout", "endpoint", "proxy", "read_timeout"}
)
"""Options that are named as for ``s3://``; obstore's own names are taken besides."""

_CONNECT_SECONDS, _READ_SECONDS, _PART_SECONDS = 10.0, 30.0, 600.0
_WHOLE = timedelta(days=1)
_FLAGS = {"true": True, "false": False}


def cloud_store(url: StoreURL, options: StoreOptions, *, writes: bool) -> GCSStore | AzureStore:
    """Return obstore's store of a bucket or container, without a prefix and without retries.

    Args:
        url: Of scheme ``gs`` or ``az``.
        options: What the user gave; the rest comes from obstore's environment variables.
        writes: Wait for an answer as long as a part may take to be sent.

    Raises:
        UsageError: An option that obstore does not know, or a value that it does not take.
    """
    kind = GCSStore if url.scheme == "gs" else AzureStore
    config = _config(url.scheme, options)
    try:
        return kind(
            url.bucket,
            config=config,
            client_options=_client_options(options, writes=writes),
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )
    except UnknownConfigurationKeyError as error:
        own = ", ".join(sorted(OWN_OPTIONS))
        raise UsageError(
            f"--store-option: {_first_line(error)}",
            hint=f"known are {own}, and the configuration keys of obstore's {kind.__name__}",
            code="unknown-store-option",
        ) from error
    except (BaseError, ValueError, TypeError) as error:
        raise UsageError(f"{url}: {_first_line(error)}", code="bad-store-option") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _config(scheme: str, options: StoreOptions) -> Any:
    config: dict[str, Any] = {
        key: _FLAGS.get(value.lower(), value)
        for key, value in options.values.items()
        if key not in OWN_OPTIONS
    }
    if options.flag("anonymous"):
        config["skip_signature"] = True
    endpoint = options.text("endpoint")
    if endpoint is not None:
        config["base_url" if scheme == "gs" else "endpoint"] = endpoint
    return config


def _client_options(options: StoreOptions, *, writes: bool) -> Any:
    seconds = options.number("read_timeout", _READ_SECONDS)
    found: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=options.number("connect_timeout", _CONNECT_SECONDS)),
        # Runs from the first byte that is sent until the answer begins.
        "read_timeout": timedelta(seconds=max(seconds, _PART_SECONDS) if writes else seconds),
        "timeout": _WHOLE,
        "user_agent": "mxconvert",
        "allow_http": (options.text("endpoint") or "").startswith("http://"),
    }
    if proxy := options.text("proxy"):
        found["proxy_url"] = proxy
    if path := options.text("ca_bundle"):
        try:
            found["root_certificate"] = Path(path).read_bytes()
        except OSError as error:
            raise LocalError.unreadable(path, error) from error
    return found
