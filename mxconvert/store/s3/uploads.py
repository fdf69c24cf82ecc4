"""Multipart uploads of S3, taken apart so that another process can go on with them."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

from mxconvert.errors import StoreError, StoreFault
from mxconvert.store.base import Part, PartLimits, Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mxconvert.store.base import Identity, PartBody

Result = TypeVar("Result")

_COPY_PART = 2**30


class Uploads:
    """The multipart half of `S3Store`, which has the rest."""

    limits: PartLimits
    sends_checksums: bool

    def _call(self, name: str, key: str, **arguments: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _full(self, key: str) -> str:
        raise NotImplementedError

    @property
    def _root(self) -> str:
        raise NotImplementedError

    def _new_object(self, identity: Identity | None) -> dict[str, Any]:
        raise NotImplementedError

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        raise NotImplementedError

    def checked(self, work: Callable[[bool], Result]) -> Result:
        """Do a request with checksums, or without them."""
        raise NotImplementedError

    def begin_upload(self, key: str, identity: Identity) -> str:
        """See `PartStore.begin_upload`."""
        wanted = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        answer = self.checked(
            lambda checks: self._call(
                "create_multipart_upload",
                key,
                Key=self._full(key),
                **(wanted if checks else {}),
                **self._new_object(identity),
            )
        )
        return str(answer["UploadId"])

    def upload_part(
        self, key: str, upload: str, number: int, body: PartBody, crc64nvme: str
    ) -> Part:
        """See `PartStore.upload_part`."""
        part = {"Key": self._full(key), "UploadId": upload, "PartNumber": number}

        def send(checks: bool) -> dict[str, Any]:
            body.seek(0)
            if checks:
                digest = {"ChecksumCRC64NVME": base64_of(crc64nvme)}
            else:
                digest = {"ContentMD5": md5_of(iter(body.read, b""))}
                body.seek(0)
            return self._call("upload_part", key, Body=body, **digest, **part)

        etag = self.checked(send).get("ETag") or self._listed_tag(key, upload, number)
        return Part(number, len(body), str(etag), crc64nvme)

    def _listed_tag(self, key: str, upload: str, number: int) -> str:
        """Return the tag of a part whose upload was answered without one."""
        for part in self.parts(key, upload):
            if part.number == number:
                return part.etag
        raise StoreError(
            StoreFault.TRANSIENT, f"{self.url(key)}: the store does not list part {number}"
        )

    def parts(self, key: str, upload: str) -> list[Part]:
        """See `PartStore.parts`."""
        found: list[Part] = []
        marker = 0
        while True:
            page = self._call(
                "list_parts",
                key,
                Key=self._full(key),
                UploadId=upload,
                PartNumberMarker=marker,
            )
            for part in page.get("Parts", ()):
                crc = part.get("ChecksumCRC64NVME")
                hexadecimal = base64.b64decode(crc).hex() if crc else None
                found.append(Part(part["PartNumber"], part["Size"], part["ETag"], hexadecimal))
            following = page.get("NextPartNumberMarker")
            if not page.get("IsTruncated") or not following or following <= marker:
                return sorted(found, key=lambda part: part.number)
            marker = following

    def complete(self, key: str, upload: str, parts: Sequence[Part], identity: Identity) -> None:
        """See `PartStore.complete`; the store compares size and checksum of the whole."""
        wanted = {
            "ChecksumCRC64NVME": base64_of(identity.crc64nvme),
            "ChecksumType": "FULL_OBJECT",
            "MpuObjectSize": identity.size,
        }
        answer = self.checked(
            lambda checks: self._call(
                "complete_multipart_upload",
                key,
                Key=self._full(key),
                UploadId=upload,
                MultipartUpload={"Parts": [_listed(part, checks=checks) for part in parts]},
                **(wanted if checks else {}),
            )
        )
        if not any(answer.get(name) for name in ("ETag", "Key", "Location")):
            raise StoreError(StoreFault.TRANSIENT, f"{self.url(key)}: the upload has no result")

    def abort(self, key: str, upload: str) -> None:
        """See `PartStore.abort`."""
        try:
            self._call("abort_multipart_upload", key, Key=self._full(key), UploadId=upload)
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See `PartStore.uploads`."""
        skip = len(self._root)
        key_marker = id_marker = None
        while True:
            page = self._call(
                "list_multipart_uploads",
                prefix,
                Prefix=self._root + prefix,
                KeyMarker=key_marker,
                UploadIdMarker=id_marker,
            )
            for found in page.get("Uploads", ()):
                started = found["Initiated"].timestamp() if "Initiated" in found else 0.0
                yield Upload(found["Key"][skip:], found["UploadId"], started)
            before = key_marker, id_marker
            key_marker, id_marker = page.get("NextKeyMarker"), page.get("NextUploadIdMarker")
            if not page.get("IsTruncated") or not key_marker or (key_marker, id_marker) == before:
                return

    def copy_parts(self, origin: dict[str, str], key: str, identity: Identity) -> None:
        """Copy an object that is too large for one request."""
        upload = self.begin_upload(key, identity)
        try:
            source = {"UploadId": upload, "CopySource": origin}
            count = -(-identity.size // _COPY_PART)
            parts = [
                self._copy_part(key, number, identity.size, source)
                for number in range(1, count + 1)
            ]
            self.complete(key, upload, parts, identity)
        except BaseException:
            self.abort(key, upload)
            raise

    def _copy_part(self, key: str, number: int, size: int, source: dict[str, Any]) -> Part:
        begin, end = (number - 1) * _COPY_PART, min(number * _COPY_PART, size)
        answer = self._call(
            "upload_part_copy",
            key,
            Key=self._full(key),
            PartNumber=number,
            CopySourceRange=f"bytes={begin}-{end - 1}",
            **source,
        )
        result = answer.get("CopyPartResult") or {}
        crc = result.get("ChecksumCRC64NVME")
        return Part(
            number, end - begin, result["ETag"], base64.b64decode(crc).hex() if crc else None
        )


def _listed(part: Part, *, checks: bool) -> dict[str, Any]:
    listed: dict[str, Any] = {"PartNumber": part.number, "ETag": part.etag}
    if checks and part.crc64nvme is not None:
        listed["ChecksumCRC64NVME"] = base64_of(part.crc64nvme)
    return listed


def md5_of(pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the MD5 of a body as Content-MD5 has it; it guards against accidents only."""
    found = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        found.update(piece)
    return base64.b64encode(found.digest()).decode()


def base64_of(digits: str) -> str:
    """Return a hexadecimal digest as S3 writes it."""
    return base64.b64encode(bytes.fromhex(digits)).decode()
