"""A loopback stand-in for Google Cloud Storage: the part of its XML API that obstore speaks.

Written from Google's description of that API, and as strict as it is about conditions and
parts. Emulators that can be had speak the JSON API alone.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from tests.support.loopback import LoopbackServer


class Entry(NamedTuple):
    data: bytes
    generation: int
    meta: dict[str, str]

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(self.data).hexdigest()}"',  # noqa: S324  (as GCS does)
            "x-goog-generation": str(self.generation),
            "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
            **self.meta,
        }


@dataclass
class GcsServer(LoopbackServer):
    """The server; ``objects`` is by bucket and key, ``uploads`` what is not completed."""

    objects: dict[str, dict[str, Entry]] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    generation: int = 1_700_000_000_000_000

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (_Handler,), {"gcs": self})

    def make_bucket(self) -> str:
        name = f"test-{uuid.uuid4().hex[:16]}"
        self.objects[name] = {}
        return name

    def fail_next(self, *statuses: int) -> None:
        """Answer the next requests with these."""
        self.answers.extend(statuses)

    def store(self, bucket: str, key: str, data: bytes, meta: dict[str, str]) -> Entry:
        self.generation += 1
        self.objects[bucket][key] = Entry(data, self.generation, meta)
        return self.objects[bucket][key]


class _Handler(BaseHTTPRequestHandler):
    gcs: GcsServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.gcs.lock:
            self.gcs.requests.append(f"{self.command} {self.path}")
            if self.gcs.answers:
                self.refuse(self.gcs.answers.pop(0), "AsTold")
            elif bucket not in self.gcs.objects:
                self.refuse(404, "NoSuchBucket")
            elif not key:
                self.list(bucket, query)
            elif "uploadId" in query or "uploads" in query:
                self.upload(bucket, key, query, body)
            else:
                getattr(self, self.command.lower())(bucket, key, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one  # noqa: N815

    def get(self, bucket: str, key: str, _: bytes) -> None:
        entry = self.gcs.objects[bucket].get(key)
        if entry is None:
            return self.refuse(404, "NoSuchKey")
        wanted = self.headers.get("If-Match")
        if wanted not in (None, entry.headers["ETag"]):
            return self.refuse(412, "PreconditionFailed")
        unit, _, ranged = (self.headers.get("Range") or "").partition("=")
        if not unit:
            return self.answer(200, entry.data, **entry.headers)
        begin, _, end = ranged.partition("-")
        data = entry.data[int(begin) : int(end) + 1]
        if not data:
            return self.refuse(416, "InvalidRange")
        where = f"bytes {begin}-{int(begin) + len(data) - 1}/{len(entry.data)}"
        return self.answer(206, data, **entry.headers, **{"Content-Range": where})

    head = get

    def meta(self) -> dict[str, str]:
        return {k: v for k, v in self.headers.items() if k.lower().startswith("x-goog-meta-")}

    def put(self, bucket: str, key: str, body: bytes) -> None:
        found = self.gcs.objects[bucket].get(key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            return self.refuse(412, "PreconditionFailed")
        source = self.headers.get("x-goog-copy-source")
        if source is None:
            entry = self.gcs.store(bucket, key, body, self.meta())
            return self.answer(200, **entry.headers)
        other, _, origin = unquote(source).removeprefix("/").partition("/")
        copied = self.gcs.objects[other].get(origin)
        if copied is None:
            return self.refuse(404, "NoSuchKey")
        entry = self.gcs.store(bucket, key, copied.data, copied.meta)
        return self.answer(200, b"<CopyObjectResult/>", **entry.headers)

    def delete(self, bucket: str, key: str, _: bytes) -> None:
        if self.gcs.objects[bucket].pop(key, None) is None:
            return self.refuse(404, "NoSuchKey")
        return self.answer(204)

    def upload(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        uploads = self.gcs.uploads
        if "uploads" in query:
            name = uuid.uuid4().hex
            uploads[name] = (self.meta(), {})
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
            return self.answer(200, f"{text}</InitiateMultipartUploadResult>".encode())
        if query["uploadId"] not in uploads:
            return self.refuse(404, "NoSuchUpload")
        meta, parts = uploads[query["uploadId"]]
        if self.command == "DELETE":
            del uploads[query["uploadId"]]
            return self.answer(204)
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            return self.answer(200, ETag=f'"{len(body)}"')
        numbers = [int(each.text or 0) for each in ET.fromstring(body).iter()
                   if each.tag.endswith("PartNumber")]  # fmt: skip
        if numbers != sorted(parts) or not numbers:
            return self.refuse(400, "InvalidPart")
        del uploads[query["uploadId"]]
        entry = self.gcs.store(bucket, key, b"".join(parts[each] for each in numbers), meta)
        text = f"<CompleteMultipartUploadResult><ETag>{entry.headers['ETag']}</ETag>"
        return self.answer(200, f"{text}</CompleteMultipartUploadResult>".encode(), **entry.headers)

    def list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries, folders = [], set()
        for key, entry in sorted(self.gcs.objects[bucket].items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(entry.data)}</Size>"
                    f"<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
                    f"<ETag>{entry.headers['ETag']}</ETag></Contents>"
                )
        entries += [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
                    for each in sorted(folders)]  # fmt: skip
        text = f"<ListBucketResult>{''.join(entries)}</ListBucketResult>"
        self.answer(200, text.encode())
