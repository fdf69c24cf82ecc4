"""Preflight of a whole checkpoint folder."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from mxconvert.errors import LocalError, SourceError, brief
from mxconvert.model import Checkpoint, Sidecar, Skipped, SourceFile, TensorInfo
from mxconvert.source.index import ShardIndex, load_index, load_json
from mxconvert.source.listing import CONFIG_NAME, Listing, list_folder, refuse_lookalikes
from mxconvert.source.shards import read_header, refuse_lfs_pointer
from mxconvert.source.unindexed import choose_unindexed, is_second_copy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SHOWN = 8
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors$")
_HASH_PIECE = 1 << 20


def open_checkpoint(root: Path, *, unindexed: str | None = None) -> Checkpoint:
    """Read and check every header of a checkpoint folder; no payload is read.

    Args:
        root: A Hugging Face folder, with or without an index, links of the hub's cache
            allowed.
        unindexed: What to do with stored tensors that the index does not list:
            ``"include"``, ``"skip"``, or ``None`` for the default (skip second copies,
            refuse others that stand in files of their own).

    Raises:
        SourceError: Damaged, inconsistent or ambiguous; names the file and tensor.
        LocalError: Something cannot be read.
    """
    listing = list_folder(root)
    config = _load_config(listing)
    index = load_index(listing)
    if not listing.weights:
        raise SourceError(
            f"{root}: no .safetensors files"
            + _others(listing.skipped, "weights in another format"),
            hint="mxconvert reads safetensors only",
            code="no-weights",
        )
    if index is None:
        return _without_index(listing, config, unindexed)
    return _with_index(listing, config, index, unindexed)


def _others(skipped: Iterable[Skipped], reason: str) -> str:
    names = [entry.name for entry in skipped if entry.reason == reason]
    return f" (found {_some(names)})" if names else ""


def _short(name: str) -> str:
    return brief(name)[1:-1] if name.isprintable() else brief(name)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _load_config(listing: Listing) -> dict[str, Any]:
    if CONFIG_NAME not in listing.sidecars:
        snapshots = sorted((listing.root / "snapshots").glob("*"))
        inside = f", for example {snapshots[0]}" if snapshots else ""
        raise SourceError(
            f"{listing.root}: no config.json",
            hint=f"point at the folder that holds config.json and the weights{inside}",
            code="no-config",
        )
    config = load_json(listing, CONFIG_NAME)
    if not isinstance(config, dict):
        raise SourceError(
            f"config.json: a JSON {type(config).__name__}, expected an object",
            hint="fetch the file again",
        )
    return config


# ------------------------------------------------------------------- without an index


def _without_index(listing: Listing, config: dict[str, Any], unindexed: str | None) -> Checkpoint:
    main = [name for name in listing.weights if "/" not in name and not is_second_copy(name)]
    if not main:  # nothing else: then the consolidated file is the model
        main = [name for name in listing.weights if "/" not in name] or listing.weights
    _refuse_incomplete_sets(main)
    headers = [read_header(listing.root, name) for name in main]
    owners: dict[str, TensorInfo] = {}
    for _, tensors in headers:
        for tensor in tensors:
            other = owners.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise SourceError(
                    f"tensor {brief(tensor.name)} is in {other.file} and in {tensor.file}, and no "
                    "index says which one counts",
                    hint="remove the files that do not belong to the model, or add its "
                    "model.safetensors.index.json",
                    code="ambiguous-shards",
                )
    extras = choose_unindexed(
        listing,
        index_path="the files at the top of the folder",
        chosen=owners,
        inside=(),
        unindexed=unindexed,
    )
    return _assemble(
        listing,
        config,
        files=[*(file for file, _ in headers), *extras.files],
        tensors={**owners, **extras.tensors},
        skipped=extras.skipped_files,
        notices=extras.notices,
    )


def _refuse_incomplete_sets(names: list[str]) -> None:
    sets: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        match = _NUMBERED.match(name)
        if match:
            sets[match[1], int(match[3])].add(int(match[2]))
    for (stem, count), found in sets.items():
        if len(found) < count:
            absent = sorted(set(range(1, count + 1)) - found)
            raise SourceError(
                f"{stem}-*-of-{count}: {count - len(found)} of {count} shards are missing "
                f"(numbers {_some([str(number) for number in absent])})",
                hint="fetch the missing shards",
                code="missing-shards",
            )


# ---------------------------------------------------------------------- with an index


def _with_index(
    listing: Listing, config: dict[str, Any], index: ShardIndex, unindexed: str | None
) -> Checkpoint:
    _refuse_missing_shards(listing, index)
    mapped = sorted(set(index.weight_map.values()))
    headers = dict(_named(read_header(listing.root, name) for name in mapped))
    stored: dict[str, list[TensorInfo]] = defaultdict(list)
    for _, tensors in headers.values():
        for tensor in tensors:
            stored[tensor.name].append(tensor)
    chosen = _resolve(index, stored)
    notices = _check_total_size(index, chosen)
    extras = choose_unindexed(
        listing,
        index_path=index.path,
        chosen=chosen,
        inside=[t for copies in stored.values() for t in copies if chosen.get(t.name) is not t],
        unindexed=unindexed,
    )
    return _assemble(
        listing,
        config,
        files=[*(file for file, _ in headers.values()), *extras.files],
        tensors={**chosen, **extras.tensors},
        skipped=extras.skipped_files,
        dropped=extras.dropped,
        notices=(*notices, *extras.notices),
    )


def _named(
    headers: Iterable[tuple[SourceFile, list[TensorInfo]]],
) -> Iterable[tuple[str, tuple[SourceFile, list[TensorInfo]]]]:
    return ((header[0].path, header) for header in headers)


def _refuse_missing_shards(listing: Listing, index: ShardIndex) -> None:
    present = set(listing.weights)
    counts = Counter(file for file in index.weight_map.values() if file not in present)
    if not counts:
        return
    lines = "; ".join(f"{_short(name)} ({count} tensors)" for name, count in sorted(counts.items()))
    raise SourceError(
        f"{index.path} names {len(counts)} files that are not in the folder: {lines}",
        hint="fetch the missing shards, for example by running the download again",
        code="missing-shards",
    )


def _resolve(index: ShardIndex, stored: dict[str, list[TensorInfo]]) -> dict[str, TensorInfo]:
    chosen: dict[str, TensorInfo] = {}
    wrong: list[str] = []
    for name, file in index.weight_map.items():
        copies = stored.get(name, [])
        match = next((tensor for tensor in copies if tensor.file == file), None)
        if match is not None:
            chosen[match.name] = match  # the header's string, so that the index's can go
        elif copies:
            wrong.append(f"{brief(name)} is stored in {copies[0].file}, the index says {file}")
        else:
            wrong.append(f"{brief(name)} is in no shard, the index says {file}")
    if wrong:
        raise SourceError(
            f"{index.path} disagrees with the shards about {len(wrong)} tensors: "
            + "; ".join(wrong[:_SHOWN])
            + ("; ..." if len(wrong) > _SHOWN else ""),
            hint="fetch the index and the shards of one and the same revision",
            code="index-mismatch",
        )
    return chosen


def _check_total_size(index: ShardIndex, chosen: dict[str, TensorInfo]) -> list[tuple[str, str]]:
    actual = sum(tensor.size for tensor in chosen.values())
    if index.total_size is None or index.total_size == actual:
        return []
    return [
        (
            "index-total-size",
            (
                f"{index.path}: metadata.total_size is {brief(index.total_size)}, the tensors have "
                f"{actual} bytes; the output's index is written anew"
            ),
        )
    ]


# --------------------------------------------------------------------------- assembly


def _assemble(
    listing: Listing,
    config: dict[str, Any],
    *,
    files: list[SourceFile],
    tensors: dict[str, TensorInfo],
    skipped: Iterable[Skipped] = (),
    dropped: tuple[Skipped, ...] = (),
    notices: tuple[tuple[str, str], ...] = (),
) -> Checkpoint:
    refuse_lookalikes(tensors, "tensors", fold_case=False)
    used = {tensor.file for tensor in tensors.values()}
    return Checkpoint(
        root=listing.root,
        files=tuple(sorted((f for f in files if f.path in used), key=lambda f: f.path)),
        tensors=dict(sorted(tensors.items())),
        config=config,
        sidecars=tuple(_sidecar(listing, name) for name in sorted(listing.sidecars)),
        skipped_files=tuple(sorted([*listing.skipped, *skipped], key=lambda s: s.name)),
        dropped_tensors=dropped,
        notices=notices,
    )


def _head(listing: Listing, name: str) -> bytes:
    try:
        with listing.path(name).open("rb") as file:
            return file.read(1024)
    except OSError as error:
        raise LocalError.unreadable(listing.path(name), error) from error


def _sidecar(listing: Listing, name: str) -> Sidecar:
    refuse_lfs_pointer(_head(listing, name), name)
    digest, size = hashlib.sha256(), 0
    try:
        with listing.path(name).open("rb") as file:
            while piece := file.read(_HASH_PIECE):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise LocalError.unreadable(listing.path(name), error) from error
    return Sidecar(path=name, size=size, sha256=digest.hexdigest())
