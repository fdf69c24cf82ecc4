"""Faults of S3's own: its errors, and the ways in which other services differ from Amazon's.

The errors are `Respond` actions, made by functions; the differences are classes. A class that
changes a signed header or parameter has the proxy sign the request anew.
"""

from __future__ import annotations

import base64
import secrets
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tests.support.faults.actions import Respond
from tests.support.faults.rules import Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.faults.exchange import Exchange
    from tests.support.faults.wire import Request, Response

CONDITIONS = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")


def slow_down(retry_after: str | None = None) -> Respond:
    """503 SlowDown."""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return Respond(503, "SlowDown", "Please reduce your request rate.", headers=headers)


def internal_error(status: int = 500) -> Respond:
    """500 InternalError; as 200 the late failure of CompleteMultipartUpload or CopyObject."""
    return Respond(status, "InternalError", "We encountered an internal error. Please try again.")


def expired_token() -> Respond:
    """400 ExpiredToken; give the rule ``access_key=`` to expire one key."""
    return Respond(400, "ExpiredToken", "The provided token has expired.")


def skewed_clock() -> Respond:
    """403 RequestTimeTooSkewed."""
    text = "The difference between the request time and the current time is too large."
    return Respond(403, "RequestTimeTooSkewed", text)


def access_denied() -> Respond:
    """403 AccessDenied."""
    return Respond(403, "AccessDenied", "Access Denied")


def not_implemented() -> Respond:
    """501 NotImplemented, as for conditional writes: add it with ``where=conditional``."""
    text = "A header you provided implies functionality that is not implemented"
    return Respond(501, "NotImplemented", text)


def moved(region: str) -> Respond:
    """301 with the region in a header: no Location, no body."""
    return Respond(301, headers={"x-amz-bucket-region": region}, body=b"")


def malformed_authorization(region: str) -> Respond:
    """400 AuthorizationHeaderMalformed, which names the region to sign for."""
    text = f"The authorization header is malformed; the region is wrong; expecting '{region}'"
    named = {"headers": {"x-amz-bucket-region": region}, "extra": {"Region": region}}
    return Respond(400, "AuthorizationHeaderMalformed", text, **named)


def illegal_location(region: str) -> Respond:
    """400 IllegalLocationConstraintException."""
    text = f"The {region} location constraint is incompatible for the region specific endpoint."
    return Respond(400, "IllegalLocationConstraintException", text)


def invalid_range() -> Respond:
    """416 InvalidRange."""
    return Respond(416, "InvalidRange", "The requested range is not satisfiable")


def no_checksums(status: int = 400) -> Respond:
    """400 or 501 of services without the newer checksums: add it with ``where=with_checksum``."""
    code = "NotImplemented" if status == 501 else "InvalidArgument"
    return Respond(status, code, "x-amz-checksum is not supported")


def conditional(request: Request) -> bool:
    """For a rule's ``where``: whether the request has a condition."""
    return any(name in request.headers for name in CONDITIONS)


def with_checksum(request: Request) -> bool:
    """For a rule's ``where``: whether a request brings checksums of the newer kinds."""
    names = {name.lower() for name, _ in request.headers} - {"x-amz-checksum-mode"}
    newer = ("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer")
    encoding = request.headers.get("content-encoding") or ""
    payload = request.headers.get("x-amz-content-sha256") or ""
    return (
        any(name.startswith(newer) for name in names)
        or "aws-chunked" in encoding
        or payload.startswith("STREAMING-")
    )


class StripChecksums(Action):
    """Take the checksums out of the answers' heads."""

    def response(self, exchange: Exchange, response: Response) -> None:
        response.headers.remove_field("x-amz-checksum-*")


class WholeChecksum(Action):
    """Give answers to ranged GETs the CRC64NVME of the whole object, as some services do.

    Args:
        value: Instead of the object's own.
    """

    def __init__(self, value: str | None = None) -> None:
        self.value = value

    def response(self, exchange: Exchange, response: Response) -> None:
        if response.status != 206:
            return
        request = exchange.request
        value = self.value or self._checksum(exchange, request.bucket, request.key)
        response.headers.set("x-amz-checksum-crc64nvme", value)
        response.headers.set("x-amz-checksum-type", "FULL_OBJECT")

    @staticmethod
    def _checksum(exchange: Exchange, bucket: str, key: str) -> str:
        from awscrt.checksums import crc64nvme

        data = exchange.proxy.server.get(bucket, key)
        return base64.b64encode(crc64nvme(data).to_bytes(8, "big")).decode()


class IgnoreRange(Action):
    """Answer 200 with the whole object to a ranged GET."""

    def request(self, exchange: Exchange) -> None:
        exchange.change(remove=("range",))


class IgnoreConditions(Action):
    """Forward without If-Match and its kin: a service that takes any write."""

    def request(self, exchange: Exchange) -> None:
        exchange.change(remove=CONDITIONS)


class ChangeETag(Action):
    """Give objects other ETags, consistently also in conditions.

    Args:
        make: From the server's ETag (in quotes) to another, or to None for no header;
            `etag_of_parts`, `etag_base64`, `etag_random` and `etag_none` are ready.
    """

    def __init__(self, make: Callable[[str], str | None]) -> None:
        self.make = make
        self._real: dict[str, str] = {}

    def request(self, exchange: Exchange) -> None:
        for name in ("if-match", "if-none-match"):
            given = exchange.request.headers.get(name)
            if given is not None and (real := self._real.get(given.strip('"'))):
                exchange.change(set={name: real})

    def response(self, exchange: Exchange, response: Response) -> None:
        real = response.headers.get("etag")
        if real is None:
            return
        made = self.make(real)
        response.headers.remove_field("etag")
        if made is not None:
            self._real[made.strip('"')] = real
            response.headers.append(("ETag", made))


def etag_of_parts(real: str) -> str:
    """As of a multipart upload of 12 parts."""
    return f'"{real.strip(chr(34))[:32]:0<32}-12"'


def etag_base64(real: str) -> str:
    """In base64."""
    return f'"{base64.b64encode(real.encode()).decode()}"'


def etag_random(_real: str) -> str:
    """Another each time."""
    return f'"{secrets.token_hex(16)}"'


def etag_none(_real: str) -> None:
    """No ETag."""


class Anonymous(Action):
    """Refuse requests without a signature, except GET and HEAD below public places.

    Args:
        public: Globs of ``/BUCKET/KEY`` whose objects anyone may read.
        listing: Whether anyone may list these buckets too.
    """

    def __init__(self, *public: str, listing: bool = False) -> None:
        self.public, self.listing = public, listing

    def request(self, exchange: Exchange) -> Response | None:
        request = exchange.request
        if exchange.record.signed:
            return None
        reads = request.method in {"GET", "HEAD"} and (self.listing or request.key)
        if reads and any(self._is_public(request, glob) for glob in self.public):
            exchange.changed = True  # signed with the server's key
            return None
        return access_denied().request(exchange)

    @staticmethod
    def _is_public(request: Request, glob: str) -> bool:
        path = request.path
        if not request.key:
            path, glob = request.bucket, glob[1:].partition("/")[0]
        return fnmatchcase(path, glob)
