"""`mxconvert.open`: the verified tensors of an artifact, straight from where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from mxconvert.errors import UsageError
from mxconvert.manifest import RECORD_NAME, TENSORS_NAME, iter_tensors
from mxconvert.model import PACKED_SUFFIX, SCALE_SUFFIX
from mxconvert.placement import Placement, format_experts
from mxconvert.quantize import Quantizer, load_backend
from mxconvert.reading.arrays import framework_of
from mxconvert.reading.fetch import Fetcher
from mxconvert.reading.runs import RUN_BYTES, Unit, runs_of, units_of
from mxconvert.remote import find_artifact, read_document
from mxconvert.selection import Request, effective, parse_record
from mxconvert.store import (
    Client,
    ClientOptions,
    StoreOptions,
    open_store,
    parse_store_options,
    parse_url,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from mxconvert.manifest import Manifest, TensorRecord
    from mxconvert.reading.arrays import Framework
    from mxconvert.reading.fetch import Filled

MAX_BYTES = 1 << 30
"""Bytes that are read ahead of whoever takes the tensors, by default."""

_RECORD_LIMIT = 1 << 28


def open_artifact(
    where: str | os.PathLike[str],
    *,
    expect_id: str | None = None,
    jobs: int = 16,
    retry_for: float = 300.0,
    store_options: Mapping[str, str] | None = None,
) -> OpenArtifact:
    """Open an artifact at a store or in a folder; nothing but its manifest is read yet.

    Args:
        where: ``URL[@VERSION]`` as of ``mxconvert pull``, or a folder, also one with a part.
        expect_id: The artifact's id, or its first 16 digits or more.
        jobs: Most requests at once.
        retry_for: Seconds without progress after which to give up.
        store_options: As ``--store-option``.

    Raises:
        UsageError: Not a URL, or an option that the store does not take.
        StoreError: No such version, or the store fails.
        VerificationError: Not the expected artifact.
        MissingExtraError: The scheme needs a package that is not installed.
    """
    url = parse_url(str(where))
    texts = [f"{key}={value}" for key, value in (store_options or {}).items()]
    options = StoreOptions(values=parse_store_options(texts), connections=jobs)
    store = open_store(url, options)
    client = Client(store, ClientOptions(jobs=jobs, retry_for=retry_for))
    try:
        return OpenArtifact(client, url.artifact_version, expect_id)
    except BaseException:
        store.close()
        raise


class OpenArtifact:
    """An artifact whose tensors can be read; a context manager, as files are.

    Attributes:
        id: The artifact's id.
        manifest: Its manifest; of a part, of what is there.
    """

    def __init__(self, client: Client, version: str | None, expect_id: str | None) -> None:
        self._client = client
        self._artifact = find_artifact(client, version, expect_id)
        self.id = self._artifact.id
        self.manifest, records = self._what_is_there()
        self._records: dict[str, TensorRecord] = {record.name: record for record in records}

    def _what_is_there(self) -> tuple[Manifest, Iterable[TensorRecord]]:
        whole = self._artifact.manifest
        entry = next(entry for entry in whole.files if entry.path == TENSORS_NAME)
        tensors = read_document(self._client, self._artifact, entry)
        key = self._artifact.key(RECORD_NAME)
        if self._client.find(key) is None:
            return whole, iter_tensors(tensors)
        data = self._client.get(key, _RECORD_LIMIT).data
        manifest, listed = effective(whole, parse_record(data, RECORD_NAME), tensors)
        return manifest, iter_tensors(listed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections."""
        self._client.store.close()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def names(self) -> tuple[str, ...]:
        """Return the names of all stored tensors, as they lie in the files."""
        return tuple(self._records)

    def info(self, name: str) -> TensorRecord:
        """Return what is known of a stored tensor: dtype, shape, layer, experts, digest.

        Raises:
            UsageError: There is no such tensor.
        """
        try:
            return self._records[name]
        except KeyError:
            raise self._unknown(name) from None

    # ---------------------------------------------------------------------------- reading

    def tensors(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        placement: str | None = None,
        experts: str | Iterable[int] | None = None,
        dequantize: bool = False,
        framework: str | None = None,
        device: str | None = None,
        order: str = "arrival",
        max_bytes: int = MAX_BYTES,
    ) -> Iterator[tuple[str, Any]]:
        """Yield ``(name, tensor)`` of everything that a rank needs; each is right.

        Each tensor is compared with the XXH3-128 of the artifact's tensor list; one that arrives
        wrong is read again, then it is an error.

        Args:
            rank: Of the expert-parallel group; with ``world_size``.
            world_size: Ranks of that group.
            placement: ``linear`` or ``round-robin``.
            experts: These routed experts instead: numbers, or ``"0-15,40"``.
            dequantize: Yield ``X.weight`` in BF16 for each pair of codes and scales.
            framework: ``numpy`` (default) or ``torch``. Numpy gets the bits of BF16 (uint16) and of
                FP8 (uint8).
            device: For torch: ``cpu``, ``cuda:0``.
            order: ``arrival``: as they come; ``names``: sorted; ``files``: as they are stored.
            max_bytes: Most bytes that are read and not yet taken; a larger tensor goes alone.

        Raises:
            UsageError: Options that make no sense, a rank or an expert that does not exist.
            StoreError: The store, after retries.
            MissingExtraError: torch or the device is not here.
        """
        request = Request(
            rank=rank,
            world_size=world_size,
            placement=None if placement is None else _placement(placement),
            experts=_experts(experts),
        )
        wanted = set(request.resolve(self.manifest).experts)
        units = list(
            units_of(
                (r for r in self._records.values() if _is_wanted(r, wanted)), decoded=dequantize
            )
        )
        return self._stream(units, framework_of(framework, device), order, max_bytes)

    def get(
        self,
        name: str,
        *,
        dequantize: bool = False,
        framework: str | None = None,
        device: str | None = None,
    ) -> Any:
        """Return one tensor; with ``dequantize`` also ``X.weight`` of stored codes and scales.

        Raises:
            UsageError: There is no such tensor.
            StoreError: The store, after retries.
            MissingExtraError: torch or the device is not here.
        """
        unit = self._unit(name, dequantize=dequantize)
        ((_, tensor),) = self._stream([unit], framework_of(framework, device), "files", MAX_BYTES)
        return tensor

    def _unit(self, name: str, *, dequantize: bool) -> Unit:
        stem = name.removesuffix(".weight")
        pair = [self._records.get(stem + suffix) for suffix in (PACKED_SUFFIX, SCALE_SUFFIX)]
        found = tuple(record for record in pair if record is not None)
        if dequantize and stem != name and len(found) == len(pair):
            return Unit(name, found, decoded=True)
        return Unit(name, (self.info(name),))

    def _stream(
        self, units: list[Unit], framework: Framework, order: str, max_bytes: int
    ) -> Iterator[tuple[str, Any]]:
        if order not in ("arrival", "names", "files"):
            raise UsageError(f"order {order!r}: expected arrival, names or files", code="bad-order")
        if order == "names":
            units = sorted(units, key=lambda unit: unit.name)
        fetcher = Fetcher(
            self._client,
            self._artifact.key,
            framework.allocate,
            max_bytes=max_bytes,
            in_order=order != "arrival",
        )
        runs = runs_of(units, min(max_bytes, RUN_BYTES))
        return self._handed_over(fetcher(runs), framework)

    def _handed_over(
        self, filled: Iterator[Filled], framework: Framework
    ) -> Iterator[tuple[str, Any]]:
        quantizer = Quantizer(load_backend("auto"), "mse")
        for some in filled:
            for unit in some.run.units:
                parts = [
                    some.data[r.begin - some.run.begin : r.end - some.run.begin]
                    for r in unit.records
                ]
                yield unit.name, _tensor(unit, parts, framework, quantizer)
            framework.finish()

    def _unknown(self, name: str) -> UsageError:
        stem = name.removesuffix(".weight")
        hint = "names() lists them"
        if stem + PACKED_SUFFIX in self._records:
            hint = f"it is stored as {stem + PACKED_SUFFIX}: pass dequantize=True"
        return UsageError(
            f"{self._client.store.label}: no tensor {name!r} among {len(self)}",
            hint=hint,
            code="no-tensor",
        )


def _tensor(unit: Unit, parts: list[memoryview], framework: Framework, quantizer: Quantizer) -> Any:
    first = unit.records[0]
    if not unit.decoded:
        return framework.tensor(parts[0], first.dtype, first.shape)
    *rows, columns = first.shape
    output = framework.allocate(parts[0].nbytes * 4)
    quantizer.dequantize(parts[0], parts[1], output)
    return framework.tensor(output, "BF16", (*rows, columns * 2))


def _is_wanted(record: TensorRecord, wanted: set[int]) -> bool:
    if record.experts is None:
        return True
    return any(expert in wanted for expert in range(record.experts[0], record.experts[1] + 1))


def _placement(name: str) -> Placement:
    if name not in list(Placement):
        raise UsageError(f"placement {name!r}: expected {' or '.join(Placement)}", code="bad-rank")
    return Placement(name)


def _experts(experts: str | Iterable[int] | None) -> str | None:
    if experts is None or isinstance(experts, str):
        return experts
    return format_experts(experts)
