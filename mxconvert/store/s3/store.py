"""Objects of S3."""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from mxconvert.crc import crc64nvme
from mxconvert.errors import StoreError, StoreFault
from mxconvert.store.base import Blob, ObjectInfo, PartLimits
from mxconvert.store.options import S3_OPTIONS, Checksum
from mxconvert.store.s3.connection import Connection
from mxconvert.store.s3.faults import translated
from mxconvert.store.s3.uploads import Uploads, base64_of, md5_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mxconvert.store.base import Condition, Identity
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

Result = TypeVar("Result")

_SHA256 = "mxconvert-sha256"
_PIECE = 2**20
_PARTIAL = 206
_COPY_LIMIT = 5 * 2**30
_LARGEST = int(48.8 * 2**40)


class S3Store(Uploads):
    """Objects below a prefix of a bucket. One instance serves all threads."""

    dropped_checksums = False
    """Whether the store has refused checksums, so that none are sent any more."""

    def __init__(self, url: StoreURL, options: StoreOptions) -> None:
        options.refuse_unknown(S3_OPTIONS, "s3")
        self._url = url
        self._connection = Connection(options)
        self._options = options
        self.sends_checksums = options.checksum is not Checksum.WHEN_REQUIRED
        self.limits = PartLimits(
            count=options.count("part_count", 10_000),
            object_size=options.count("max_object_size", _LARGEST),
        )
        self._has_tags = True
        self._payer = "requester" if options.flag("requester_pays") else None

    @property
    def label(self) -> str:
        """The URL, and the endpoint unless it is Amazon's."""
        if self._connection.is_amazon:
            return str(self._url)
        return f"{self._url} at {self._connection.endpoint}"

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return f"s3://{self._url.bucket}/{self._full(key)}"

    @property
    def _root(self) -> str:
        """What every key below the URL begins with: a prefix never matches its neighbours."""
        return f"{self._url.prefix}/" if self._url.prefix else ""

    def _full(self, key: str) -> str:
        return self._root + key

    def _call(self, name: str, key: str, **arguments: Any) -> dict[str, Any]:
        where = self.url(key)
        if not self._connection.is_amazon:
            where += f" at {self._connection.endpoint}"
        return self._connection.call(
            name, where, Bucket=self._url.bucket, RequestPayer=self._payer, **arguments
        )

    # ---------------------------------------------------------------------------- reading

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        answer = self.checked(lambda checks: self._head(key, checks=checks))
        size = answer.get("ContentLength")
        if size is None:
            raise StoreError(StoreFault.TRANSIENT, f"{self.url(key)}: the answer has no length")
        return _info(key, answer, size)

    def _head(self, key: str, *, checks: bool) -> dict[str, Any]:
        """Ask for an object's head.

        An error of HEAD has no body that says what it is. Where the status alone does not
        tell, the object itself is asked for, whose error says it. Where that one is given,
        the refusal may have passed (a credential renewed, a clock set); HEAD is asked for
        once more, and a second refusal is meant.
        """
        arguments = {"Key": self._full(key), "ChecksumMode": "ENABLED" if checks else None}
        try:
            return self._call("head_object", key, **arguments)
        except StoreError as error:
            if error.fault not in (StoreFault.REFUSED, StoreFault.DENIED):
                raise
            self._call("get_object", key, **arguments)["Body"].close()
        try:
            return self._call("head_object", key, **arguments)
        except StoreError as error:
            if error.fault not in (StoreFault.REFUSED, StoreFault.DENIED):
                raise
            raise StoreError(
                error.fault,
                f"{error.message}, though it gives the object",
                hint=error.hint or "let this role ask for HEAD as well as GET",
            ) from error

    def open(self, key: str, begin: int, end: int, etag: str | None) -> S3Body:
        """See `Store.open`."""
        answer = self._call(
            "get_object",
            key,
            Key=self._full(key),
            Range=f"bytes={begin}-{end - 1}",
            IfMatch=etag if self._has_tags else None,
        )
        if self._has_tags and etag is not None and answer.get("ETag") not in (None, etag):
            answer["Body"].close()
            self._refuse_change(key, etag)
            return self.open(key, begin, end, None)
        whole = answer["ResponseMetadata"]["HTTPStatusCode"] != _PARTIAL
        return S3Body(answer["Body"], self.url(key), begin if whole else 0)

    def _refuse_change(self, key: str, etag: str) -> None:
        """Raise if an object was replaced, unless the store tags each answer differently."""
        first, second = self.head(key).etag, self.head(key).etag
        if first != second:
            self._has_tags = False
            return
        raise StoreError(
            StoreFault.CHANGED,
            f"{self.url(key)}: the object was replaced: its tag was {etag}, is {first}",
        )

    def get(self, key: str, limit: int) -> Blob:
        """See `Store.get`; botocore compares the bytes with a checksum if the store has one."""
        answer = self.checked(
            lambda checks: self._call(
                "get_object",
                key,
                Key=self._full(key),
                ChecksumMode="ENABLED" if checks else None,
            )
        )
        body, size = answer["Body"], answer.get("ContentLength", 0)
        with translated(self.url(key)), contextlib.closing(body):
            data = b"" if size > limit else _read_whole(body, limit)
        if max(size, len(data)) > limit:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(key)}: {size or 'more'} bytes, expected at most {limit}",
            )
        return Blob(data, answer.get("ETag"))

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.objects`."""
        skip = len(self._root)
        for page in self._pages("list_objects_v2", prefix, Prefix=self._root + prefix):
            for found in page.get("Contents", ()):
                key = found["Key"][skip:]
                if not key or key.endswith("/"):  # stands for a folder
                    continue
                written = found["LastModified"].timestamp() if "LastModified" in found else None
                yield ObjectInfo(
                    key=key, size=found["Size"], etag=found.get("ETag"), modified=written
                )

    def folders(self) -> Iterator[str]:
        """See `Store.folders`."""
        root = self._root
        for page in self._pages("list_objects_v2", "", Prefix=root, Delimiter="/"):
            for found in page.get("CommonPrefixes", ()):
                yield found["Prefix"][len(root) :].rstrip("/")

    def _pages(self, name: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        token = None
        while True:
            page = self._call(name, key, ContinuationToken=token, **arguments)
            yield page
            before, token = token, page.get("NextContinuationToken")
            if not page.get("IsTruncated"):
                return
            if not token or token == before:
                raise StoreError(
                    StoreFault.REFUSED, f"{self.url(key)}: the listing does not go on: no token"
                )

    # ---------------------------------------------------------------------------- writing

    def _new_object(self, identity: Identity | None) -> dict[str, Any]:
        """Return the arguments that every new object gets."""
        text = self._options.text
        return {
            "ACL": text("acl"),
            "ServerSideEncryption": text("sse"),
            "SSEKMSKeyId": text("sse_kms_key_id"),
            "StorageClass": text("storage_class"),
            "Metadata": {_SHA256: identity.sha256} if identity else None,
        }

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """See `Store.put`."""
        conditions: dict[str, Any] = {}
        if condition is not None and condition.etag is None:
            conditions["IfNoneMatch"] = "*"
        elif condition is not None:
            conditions["IfMatch"] = condition.etag
        crc = base64_of(f"{crc64nvme(data):016x}")
        arguments = self._new_object(None) | conditions
        answer = self._put(key, data, crc, arguments)
        return answer.get("ETag")

    def upload(self, key: str, pieces: Iterable[memoryview], identity: Identity) -> None:
        """See `Store.upload`: one request, for what is smaller than a part."""
        data = bytearray()
        for piece in pieces:  # each is good until the next one
            data += piece
        self._put(key, data, base64_of(identity.crc64nvme), self._new_object(identity))

    def _put(
        self, key: str, data: bytes | bytearray, crc: str, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        return self.checked(
            lambda checks: self._call(
                "put_object",
                key,
                Key=self._full(key),
                Body=data,
                ChecksumCRC64NVME=crc if checks else None,
                ContentMD5=None if checks else md5_of([data]),
                **arguments,
            )
        )

    def checked(self, work: Callable[[bool], Result]) -> Result:
        """Do a request with checksums, or without them.

        A store that refuses them is asked without, from then on, where the user leaves
        that open; Content-MD5, which all stores know, takes their place.

        Args:
            work: Makes the request, as often as it is called; its argument says whether
                checksums go with it.
        """
        if not self.sends_checksums:
            return work(False)
        try:
            return work(True)
        except StoreError as error:
            refused = error.fault is StoreFault.UNSUPPORTED
            if not refused or self._options.checksum is not Checksum.AUTO:
                raise
        result = work(False)
        self.sends_checksums = False
        self.dropped_checksums = True
        return result

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """See `Store.copy`; large objects part by part."""
        origin = {"Bucket": self._url.bucket, "Key": self._full(source)}
        if identity.size > _COPY_LIMIT:
            self.copy_parts(origin, key, identity)
            return
        arguments = self._new_object(identity)
        answer = self.checked(
            lambda checks: self._call(
                "copy_object",
                key,
                Key=self._full(key),
                CopySource=origin,
                MetadataDirective="REPLACE",
                ChecksumAlgorithm="CRC64NVME" if checks else None,
                **arguments,
            )
        )
        if not answer.get("CopyObjectResult"):  # an error inside a 200
            raise StoreError(StoreFault.TRANSIENT, f"{self.url(key)}: the copy has no result")

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._call("delete_object", key, Key=self._full(key))

    def renew(self) -> None:
        """See `Store.renew`."""
        self._connection.renew()

    def close(self) -> None:
        """See `Store.close`."""
        self._connection.close()


class S3Body:
    """The bytes of one answer."""

    def __init__(self, body: Any, where: str, skip: int) -> None:
        self.skip = skip
        self._body = body
        self._where = where

    def read(self, most: int, /) -> bytes:
        """See `Body.read`."""
        with translated(self._where):
            data: bytes = self._body.read(most)
        return data

    def close(self) -> None:
        """See `Body.close`."""
        self._body.close()


def _read_whole(body: Any, limit: int) -> bytes:
    """Read a body to its end, or a little more than ``limit`` bytes of it.

    At the end botocore compares its length with what was announced.
    """
    data = bytearray()
    while len(data) <= limit and (piece := body.read(_PIECE)):
        data += piece
    return bytes(data)


def _info(key: str, answer: dict[str, Any], size: int) -> ObjectInfo:
    crc = answer.get("ChecksumCRC64NVME")
    whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return ObjectInfo(
        key=key,
        size=size,
        etag=answer.get("ETag"),
        crc64nvme=to_hex(crc) if crc and whole else None,
        sha256=answer.get("Metadata", {}).get(_SHA256),
        modified=answer["LastModified"].timestamp() if "LastModified" in answer else None,
    )


def to_hex(text: str) -> str | None:
    """Return one of S3's digests in hexadecimal; ``None`` if it is not eight bytes."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    return raw.hex() if len(raw) == 8 else None  # noqa: PLR2004  (CRC64)
