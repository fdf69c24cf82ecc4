"""A loopback stand-in for the Hugging Face Hub: what huggingface_hub asks of it, no more."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tests.support.loopback import LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGE = 1000
"""Files from this size on are kept as LFS objects."""


@dataclass
class Hub(LoopbackServer):
    """A repository per name: its commits in order, each the files by path."""

    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    ignore_ranges: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (_Handler,), {"hub": self})

    def add(self, name: str, files: Mapping[str, bytes]) -> str:
        """Commit files; return the commit's id."""
        commits = self.repositories.setdefault(name, [])
        commits.append({**(commits[-1] if commits else {}), **files})
        return commit_id(len(commits))

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        commits = self.repositories[name]
        if revision == "main":
            return commits[-1]
        numbers = {commit_id(number): number for number in range(1, len(commits) + 1)}
        return commits[numbers[revision] - 1] if revision in numbers else None


def commit_id(number: int) -> str:
    return f"{number:040x}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", **{"X-Error-Code": code, "X-Error-Message": code})

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            self.hub.tokens.add(self.headers.get("Authorization"))
            if self.hub.answers:
                return self.refuse(self.hub.answers.pop(0), "AsTold")
            if path.startswith("/lfs/"):
                self.hub.lfs[path.removeprefix("/lfs/")] = body
                return self.answer(200)
            return self.route(path, body)

    do_GET = do_POST = do_PUT = handle_one  # noqa: N815

    def route(self, path: str, body: bytes) -> None:
        if path == "/api/validate-yaml":  # of a model card, before it is committed
            return self.json({"errors": [], "warnings": []})
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2]).removesuffix(".git")
        if name not in self.hub.repositories:
            return self.refuse(404, "RepoNotFound")
        what, rest = (parts[2:3] or ["revision"])[0], [unquote(part) for part in parts[3:]]
        if what == "info":
            return self.batch(json.loads(body))
        revision = rest[0] if rest else "main"
        files = self.hub.files(name, revision)
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        number = self.hub.repositories[name].index(files) + 1
        routes = {
            "revision": lambda: self.json({"id": name, "sha": commit_id(number)}),
            "tree": lambda: self.json([_entry(*each) for each in sorted(files.items())]),
            "resolve": lambda: self.resolve(files, "/".join(rest[1:])),
            "preupload": lambda: self.preupload(json.loads(body)),
            "commit": lambda: self.commit(name, [json.loads(line) for line in body.splitlines()]),
        }
        return routes[what]()

    def resolve(self, files: dict[str, bytes], path: str) -> None:
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        _, _, ranged = (self.headers.get("Range") or "").partition("=")
        if not ranged or self.hub.ignore_ranges:
            return self.answer(200, files[path])
        begin, _, end = ranged.partition("-")
        return self.answer(206, files[path][int(begin) : int(end) + 1])

    def preupload(self, asked: dict[str, Any]) -> None:
        answer = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["size"] >= LARGE else "regular",
                "shouldIgnore": each["path"] in self.hub.ignored,
            }
            for each in asked["files"]
        ]
        self.json({"files": answer})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            href = f"{self.hub.endpoint}/lfs/{each['oid']}"
            missing = each["oid"] not in self.hub.lfs
            objects.append(each | ({"actions": {"upload": {"href": href}}} if missing else {}))
        self.json({"transfer": "basic", "objects": objects})

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.lfs[value["oid"]]
        oid = self.hub.add(name, files)
        url = f"{self.hub.endpoint}/{name}/commit/{oid}"
        self.json({"commitUrl": url, "commitOid": oid, "success": True})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324  (git's)
    entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(data), "path": path}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
    return entry
