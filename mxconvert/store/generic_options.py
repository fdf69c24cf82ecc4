"""From ``--store-option`` to what fsspec's file systems take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxconvert.errors import UsageError
from mxconvert.store.options import S3_OPTIONS

if TYPE_CHECKING:
    from mxconvert.store.options import StoreOptions

_NOT_S3FS = frozenset({"max_object_size", "part_count"})
_NEW_OBJECT = {
    "acl": "ACL",
    "sse": "ServerSideEncryption",
    "sse_kms_key_id": "SSEKMSKeyId",
    "storage_class": "StorageClass",
}
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 30.0


def storage_options(options: StoreOptions, scheme: str) -> dict[str, Any]:
    """Return the arguments of the file system of a scheme.

    Raises:
        UsageError: An option of ``s3://`` that s3fs has no word for, or a bad value.
    """
    if scheme == "s3":
        return _of_s3fs(options)
    given = {key: _typed(value) for key, value in options.values.items()}
    if scheme in ("http", "https"):
        return {"client_kwargs": _of_aiohttp(), "encoded": True} | given
    return given


def _typed(text: str) -> Any:
    """Read true, false and whole numbers; everything else is text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and str(int(text)) == text else text


def _of_aiohttp() -> dict[str, Any]:
    from aiohttp import ClientTimeout  # noqa: PLC0415  (loads only what is used)

    timeout = ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
    return {"trust_env": True, "timeout": timeout}


def _of_s3fs(options: StoreOptions) -> dict[str, Any]:
    options.refuse_unknown(S3_OPTIONS, "s3")
    for key in _NOT_S3FS & set(options.values):
        raise UsageError(
            f"--store-option {key}: s3fs has nothing like it",
            hint="leave it out, or engine=fsspec",
            code="unknown-store-option",
        )
    text = options.text
    return {
        "anon": options.flag("anonymous"),
        "endpoint_url": text("endpoint"),
        "requester_pays": options.flag("requester_pays"),
        "client_kwargs": _given({"region_name": text("region"), "verify": text("ca_bundle")}),
        "config_kwargs": _of_config(options),
        "s3_additional_kwargs": _given({name: text(key) for key, name in _NEW_OBJECT.items()}),
        "default_cache_type": "none",
    } | _given({"profile": text("profile")})


def _of_config(options: StoreOptions) -> dict[str, Any]:
    proxy, addressing = options.text("proxy"), options.text("addressing")
    if addressing is None and options.text("endpoint"):
        addressing = "path"
    return {
        "connect_timeout": options.number("connect_timeout", _CONNECT_SECONDS),
        "read_timeout": options.number("read_timeout", _READ_SECONDS),
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": options.connections + 2,
    } | _given(
        {
            "proxies": {"http": proxy, "https": proxy} if proxy else None,
            "s3": {"addressing_style": addressing} if addressing else None,
        }
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
