"""Which requests a fault meets, and the hooks that a fault is made of."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.faults.proxy import Exchange
    from tests.support.faults.wire import Request, Response

_OBJECT = {
    ("GET", ""): "GetObject",
    ("HEAD", ""): "HeadObject",
    ("PUT", ""): "PutObject",
    ("DELETE", ""): "DeleteObject",
    ("GET", "uploadId"): "ListParts",
    ("PUT", "uploadId"): "UploadPart",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("POST", "uploads"): "CreateMultipartUpload",
}
_BUCKET = {
    ("GET", ""): "ListObjects",
    ("HEAD", ""): "HeadBucket",
    ("PUT", ""): "CreateBucket",
    ("DELETE", ""): "DeleteBucket",
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "location"): "GetBucketLocation",
    ("POST", "delete"): "DeleteObjects",
}


def operation(request: Request) -> str:
    """Return the S3 operation that a request asks for, by Amazon's name."""
    if not request.bucket:
        return "ListBuckets"
    table, query = _OBJECT if request.key else _BUCKET, request.query
    mark = next((name for _, name in table if name and name in query), "")
    name = table.get((request.method, mark), f"{request.method} {mark}".strip())
    if "x-amz-copy-source" in request.headers:
        return {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}.get(name, name)
    return name


class Cut(Exception):  # noqa: N818  (no error: the fault itself)
    """Raised by a fault to end the client's connection; ``reset`` with RST."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__(reset)
        self.reset = reset


class Action:
    """What a rule does. Hooks run in the connection's thread, in the order of the rules."""

    def request(self, exchange: Exchange) -> Response | None:
        """Before forwarding: change ``exchange.request``, or answer in the server's place."""
        return None

    def upload(self, exchange: Exchange, pieces: Iterable[bytes]) -> Iterable[bytes]:
        """Change the request's body on its way to the server (its length must stay)."""
        return pieces

    def response(self, exchange: Exchange, response: Response) -> None:
        """Change the answer's head; wrap ``response.body`` to change its body."""


@dataclass(eq=False)
class Rule:
    """Do something to the requests that match; every condition given must hold.

    Attributes:
        action: What to do.
        op: S3 operation, or several: ``"GetObject"``, ``("UploadPart", "PutObject")``.
        key: Glob of the key (``*`` matches slashes too).
        method: HTTP method.
        path: Glob of the unescaped path, bucket first.
        query: Parameters that must be there.
        header: A header that must be there.
        access_key: Who must have signed.
        where: Any other condition.
        skip: Let this many matching requests pass first.
        times: Act so often; None: always.
        probability: Act on this share of them, drawn from ``seed``.
        fired: How often it acted.
    """

    action: Action
    op: str | tuple[str, ...] = ()
    key: str | None = None
    method: str | None = None
    path: str | None = None
    query: tuple[str, ...] = ()
    header: str | None = None
    access_key: str | None = None
    where: Callable[[Request], object] | None = None
    skip: int = 0
    times: int | None = None
    probability: float = 1.0
    seed: int = 0
    fired: int = 0
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.op = (self.op,) if isinstance(self.op, str) else self.op

    def matches(self, request: Request) -> bool:
        """Whether the conditions on the request itself hold."""
        return bool(
            (not self.op or operation(request) in self.op)
            and (self.key is None or fnmatchcase(request.key, self.key))
            and (self.method is None or request.method == self.method)
            and (self.path is None or fnmatchcase(request.path, self.path))
            and all(name in request.query for name in self.query)
            and (self.header is None or self.header in request.headers)
            and (self.access_key is None or request.access_key == self.access_key)
            and (self.where is None or self.where(request))
        )

    def fires(self, request: Request) -> bool:
        """Whether to act on this request; counts."""
        if not self.matches(request):
            return False
        with self._lock:
            self._seen += 1
            if self._seen <= self.skip or (self.times is not None and self.fired >= self.times):
                return False
            if self.probability < 1 and self._random.random() >= self.probability:
                return False
            self.fired += 1
            return True
