"""Tags: small pointers, moved only from the state that was seen."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert import failpoints
from mxconvert.errors import StoreError, StoreFault, VerificationError
from mxconvert.events import Notice, ignore
from mxconvert.remote.layout import PROBE, REFS, is_id, ref_key
from mxconvert.store import Condition, is_tag

if TYPE_CHECKING:
    from mxconvert.events import Reporter
    from mxconvert.store import Client

SCHEMA_VERSION = 1
_LIMIT = 64 * 1024
_TRIES = 20
_ID_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a tag points, and the store's tag of the pointer for the next move."""

    tag: str
    id: str
    etag: str | None


def read_ref(client: Client, tag: str) -> Ref | None:
    """Return where a tag points, ``None`` if there is no such tag.

    Raises:
        VerificationError: The pointer is not one.
    """
    key = ref_key(tag)
    try:
        blob = client.get(key, _LIMIT)
    except StoreError as error:
        if error.fault is StoreFault.MISSING:
            return None
        raise
    try:
        document = json.loads(blob.data)
        version, found = document["schema_version"], document["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(client, key, "not a pointer of mxconvert") from error
    if version != SCHEMA_VERSION:
        raise _bad(client, key, f"schema_version {version!r}, expected {SCHEMA_VERSION}")
    if not isinstance(found, str) or len(found) != _ID_DIGITS or not is_id(found):
        raise _bad(client, key, f"id {found!r}, expected 64 hexadecimal digits")
    return Ref(tag, found, blob.etag)


def _bad(client: Client, key: str, what: str) -> VerificationError:
    return VerificationError(f"{client.store.url(key)}: {what}", code="bad-ref")


def move_ref(client: Client, tag: str, artifact_id: str) -> str | None:
    """Point a tag at an artifact; return the id it pointed at before.

    Of pushes that move one tag at once each sees the other's pointer before it replaces
    it; the last one stands.

    Raises:
        StoreError: The tag keeps being moved by others.
    """
    data = json.dumps({"id": artifact_id, "schema_version": SCHEMA_VERSION}).encode() + b"\n"
    for _ in range(_TRIES):
        seen = read_ref(client, tag)
        if seen is not None and seen.id == artifact_id:
            return seen.id
        failpoints.hit("push.moving-tag")
        try:
            client.put(ref_key(tag), data, Condition(seen.etag if seen else None))
        except StoreError as error:
            if error.fault is not StoreFault.CHANGED:
                raise
        else:
            return seen.id if seen else None
    raise StoreError(
        StoreFault.CHANGED,
        f"{client.store.url(ref_key(tag))}: was moved by others {_TRIES} times in a row",
        hint="run the same command again",
    )


def honours_conditions(client: Client) -> bool:
    """Try whether the store refuses to overwrite what it is told not to overwrite.

    Some stores take a conditional write and ignore the condition, or know one condition
    only; tags would then be moved from a state that nobody has seen.
    """
    names = [f"{PROBE}{uuid.uuid4().hex}" for _ in range(2)]
    with client.temporary(names):
        other, own = [client.put(name, _probe(name)) for name in names]
        if own is None or own == other:
            return False
        return all(_refuses(client, names[1], etag) for etag in (None, other))


def _probe(name: str) -> bytes:
    return f"a probe of mxconvert; may be removed: {name}\n".encode()


def _refuses(client: Client, key: str, etag: str | None) -> bool:
    try:
        client.put(key, _probe("written in spite of a condition"), Condition(etag))
    except StoreError as error:
        if error.fault not in (StoreFault.CHANGED, StoreFault.UNSUPPORTED):
            raise
        return error.fault is StoreFault.CHANGED
    return False


def refs_of(client: Client, report: Reporter = ignore) -> list[Ref]:
    """Return every tag that a listing shows, sorted by name; damaged ones are reported."""
    tags = [
        info.key.removeprefix(REFS).removesuffix(".json")
        for info in client.objects(REFS)
        if info.key.endswith(".json") and "/" not in info.key.removeprefix(REFS)
    ]
    return [ref for tag in sorted(tags) if (ref := _intact(client, tag, report)) is not None]


def _intact(client: Client, tag: str, report: Reporter) -> Ref | None:
    try:
        return read_ref(client, tag) if is_tag(tag) and not is_id(tag) else None
    except VerificationError as error:
        report(Notice(severity="warning", code=error.code, message=error.message))
        return None
