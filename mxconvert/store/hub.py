"""Models on the Hugging Face Hub. Tried against a stand-in, not against the Hub itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mxconvert.errors import StoreError, StoreFault, UsageError
from mxconvert.store.base import Blob, ObjectInfo
from mxconvert.store.hub_body import HubBody, requested
from mxconvert.store.hub_library import library, translated
from mxconvert.store.keys import segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from mxconvert.store.base import Condition, Identity
    from mxconvert.store.options import StoreOptions
    from mxconvert.store.url import StoreURL

_NOT_MODELS = frozenset({"datasets", "spaces", "kernels", "buckets"})
_UPLOADS = 4
"""Files that are sent at once; each takes one part's memory."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The files of a commit, by key."""

    commit: str
    files: Mapping[str, ObjectInfo]


class HubStore:
    """Files of a model repository, as of one commit.

    The revision in the URL (branch, tag or commit; else the default branch) is resolved to
    a commit once; everything is read from that commit, whatever is pushed meanwhile. Files
    kept by LFS or Xet tell their SHA-256. The token comes from huggingface_hub's own
    configuration. Writing is one `commit`; single objects cannot be written. Data sets and
    spaces are not read.
    """

    def __init__(self, url: StoreURL, options: StoreOptions) -> None:
        options.refuse_unknown({"endpoint"}, "hf")
        if url.bucket in _NOT_MODELS:
            raise UsageError(f"{url}: only models are read", hint="write hf://ORG/MODEL")
        self._hub = library()
        self._api: Any = self._hub.HfApi(endpoint=options.text("endpoint"))
        name, _, self._folder = url.prefix.partition("/")
        self._repository = f"{url.bucket}/{name}" if name else url.bucket
        self._revision = url.version
        self._lock = threading.Lock()
        self._found: _Snapshot | None = None

    @property
    def label(self) -> str:
        """The URL with the revision, and the endpoint if one was given."""
        at = f"@{self._revision}" if self._revision else ""
        return f"hf://{self._repository}{at}" + (f"/{self._folder}" if self._folder else "")

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return "/".join(filter(None, (self.label, key)))

    @property
    def commit_id(self) -> str:
        """The commit that is read."""
        return self._snapshot().commit

    def _translated(self, key: str) -> AbstractContextManager[None]:
        return translated(self.url(key))

    @property
    def _root(self) -> str:
        return f"{self._folder}/" if self._folder else ""

    # ---------------------------------------------------------------------------- reading

    def _snapshot(self) -> _Snapshot:
        with self._lock:
            if self._found is None:
                with translated(self.label):
                    info = self._api.model_info(self._repository, revision=self._revision)
                    self._found = self._files_of(str(info.sha))
            return self._found

    def _files_of(self, commit: str) -> _Snapshot:
        tree = self._api.list_repo_tree(self._repository, recursive=True, revision=commit)
        root = self._root
        files = {
            each.path[len(root) :]: _info(each.path[len(root) :], each)
            for each in tree
            if hasattr(each, "size") and each.path.startswith(root)
        }
        return _Snapshot(commit, files)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        segments(key, self.url(key))
        snapshot = self._snapshot()
        if key not in snapshot.files:
            raise StoreError(
                StoreFault.MISSING, f"{self.url(key)}: not in commit {snapshot.commit}"
            )
        return snapshot.files[key]

    def open(self, key: str, begin: int, end: int, etag: str | None) -> HubBody:
        """See `Store.open`."""
        found = self.head(key)
        if etag not in (None, found.etag):
            raise StoreError(
                StoreFault.CHANGED,
                f"{self.url(key)}: the file was replaced: its tag was {etag}, is {found.etag}",
            )
        if found.size < end:
            raise StoreError(
                StoreFault.REFUSED, f"{self.url(key)}: {found.size} bytes, expected {end}"
            )
        where = (
            f"{self._api.endpoint}/{self._repository}/resolve/{self.commit_id}/"
            f"{quote(self._root + key)}"
        )
        with self._translated(key):
            response = requested(self._hub, where, begin, end)
        return HubBody(response, begin, end, lambda: self._translated(key))

    def get(self, key: str, limit: int) -> Blob:
        """See `Store.get`."""
        found = self.head(key)
        if found.size > limit:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(key)}: {found.size} bytes, expected at most {limit}",
            )
        data = bytearray()
        if found.size:
            body = self.open(key, 0, found.size, found.etag)
            try:
                while len(data) < found.size and (piece := body.read(found.size - len(data))):
                    data += piece
            finally:
                body.close()
        if len(data) != found.size:
            raise StoreError(StoreFault.TRANSIENT, f"{self.url(key)}: the body ended early")
        return Blob(bytes(data), found.etag)

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.objects`."""
        files = self._snapshot().files
        yield from (files[key] for key in sorted(files) if key.startswith(prefix))

    def folders(self) -> Iterator[str]:
        """See `Store.folders`."""
        yield from sorted({key.partition("/")[0] for key in self._snapshot().files if "/" in key})

    # ---------------------------------------------------------------------------- writing

    def commit(self, files: Mapping[str, Path | bytes], message: str) -> str:
        """Write files in one commit onto the URL's branch; return the commit's id.

        Large files are sent first, some at a time; one that is there already is not sent
        again. Nothing is seen before the commit, and nothing else is changed by it.

        Args:
            files: By key: a local file, or bytes.
            message: Of the commit.

        Raises:
            StoreError: Among others ``NO_BUCKET``: there is no such repository, and none is
                created.
        """
        for key in files:
            segments(key, self.url(key))
        with translated(self.label):
            additions = [
                self._hub.CommitOperationAdd(
                    path_in_repo=self._root + key,
                    path_or_fileobj=data if isinstance(data, bytes) else str(data),
                )
                for key, data in files.items()
            ]
            done = self._api.create_commit(
                self._repository,
                additions,
                commit_message=message,
                revision=self._revision,
                num_threads=_UPLOADS,
            )
            found = self._files_of(str(done.oid))
        with self._lock:
            self._found = found
        self._require(files, found)
        return found.commit

    def _require(self, files: Mapping[str, Path | bytes], found: _Snapshot) -> None:
        """Refuse a commit without some of its files: a .gitignore there leaves them out."""
        left_out = sorted(set(files) - set(found.files))
        if left_out:
            raise StoreError(
                StoreFault.REFUSED,
                f"{self.url(left_out[0])}: not in commit {found.commit}, as {len(left_out)} of "
                f"{len(files)} files are not",
                hint="the repository's .gitignore may leave them out",
            )

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """Refuse: see `commit`."""
        del data, condition
        raise self._refusal(key)

    def upload(self, key: str, pieces: Iterable[memoryview], identity: Identity) -> None:
        """Refuse: see `commit`."""
        del pieces, identity
        raise self._refusal(key)

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """Refuse: see `commit`."""
        del source, identity
        raise self._refusal(key)

    def delete(self, key: str) -> None:
        """Refuse: see `commit`."""
        raise self._refusal(key)

    def _refusal(self, key: str) -> StoreError:
        return StoreError(
            StoreFault.UNSUPPORTED,
            f"{self.url(key)}: the Hub takes commits, not single files",
        )

    def renew(self) -> None:
        """See `Store.renew`: the token is read for each request anyway."""

    def close(self) -> None:
        """See `Store.close`; the session is the library's."""


def _info(key: str, found: Any) -> ObjectInfo:
    large = getattr(found, "lfs", None)
    digest = None if large is None else str(large.sha256)
    return ObjectInfo(
        key=key, size=int(found.size), etag=digest or str(found.blob_id), sha256=digest
    )
