"""Measuring an artifact that came without a report, against the checkpoint it was made from."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert import __version__
from mxconvert.errors import Interrupted, UsageError, VerificationError
from mxconvert.events import Advanced, Notice, Started
from mxconvert.manifest import MANIFEST_NAME, Manifest, parse_manifest, source_identity
from mxconvert.model import BLOCK_SIZE, PACKED_SUFFIX, SCALE_SUFFIX
from mxconvert.plan.logical import logical_tensors
from mxconvert.provenance import recipe_of
from mxconvert.quantize import FloatType, load_backend
from mxconvert.recipes.families import DENSE
from mxconvert.report.load import manifest_id
from mxconvert.sample import Sample
from mxconvert.source import SourceReader, open_checkpoint
from mxconvert.source.rows import originals
from mxconvert.statistics import (
    ITEM_SIZES,
    Counts,
    Header,
    Histograms,
    Place,
    Record,
    StoredWeight,
    TensorStats,
    Window,
    measure_weight,
)
from mxconvert.workers import default_jobs, map_bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.model import Checkpoint, TensorInfo
    from mxconvert.recipes import Classifier
    from mxconvert.statistics import RangeReader
    from mxconvert.stop import StopToken

_BYTE = "U8"
_RANK = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """A stored weight, codes and scales, and the tensor or part of one it was made from."""

    codes: TensorInfo
    scales: TensorInfo
    source: TensorInfo

    def window(self, reader: RangeReader) -> Window:
        """Return its codes and scales as the source comes."""
        codes, scales = self.codes, self.scales
        weight = StoredWeight(Place(codes.file, codes.offset), Place(scales.file, scales.offset))
        rows, columns = self.source.shape
        return Window(weight, reader, (rows, columns), by_columns=self.source.transposed)


@dataclass(slots=True)
class Measuring:
    """An artifact and a source, opened and paired; nothing is measured yet.

    Attributes:
        target: The artifact's headers.
        source: The source's headers.
        pairs: What will be measured, in the order of the artifact's bytes.
        header: Of the records to come.
    """

    target: Checkpoint
    source: Checkpoint
    pairs: list[Pair]
    header: Header
    classify: Classifier
    reporter: Reporter
    stop: StopToken
    jobs: int = field(default_factory=default_jobs)

    def records(self) -> Iterator[Record]:
        """Measure, and yield the records as they come, file by file.

        Raises:
            Interrupted: ``stop`` was set.
            SourceError: A folder changes while it is read.
            LocalError: It cannot be read.
            VerificationError: A weight decodes to values that are not finite.
        """
        size = sum(pair.source.size for pair in self.pairs)
        self.reporter(Started(what="measure", total_bytes=size, total_files=0))
        decode = load_backend("auto").dequantize
        with ExitStack() as stack:
            stored = stack.enter_context(SourceReader(self.target.root, self.target.files))
            sources = stack.enter_context(SourceReader(self.source.root, self.source.files))
            stack.enter_context(self.stop.watched())

            def work(pair: Pair) -> tuple[TensorStats, Counts]:
                counts = Counts()
                sums = measure_weight(
                    pair.window(stored),
                    originals(sources, pair.source),
                    lambda codes, scales, out: decode(codes, scales, FloatType.F32, out),
                    counts=counts,
                    advanced=self._advanced,
                )
                if not math.isfinite(sums.sum_q2 + sums.sum_x2 + sums.sum_err2):
                    raise _not_finite(pair)
                slot = self.classify(pair.source.name)
                stats = TensorStats(
                    name=pair.source.name,
                    file=pair.codes.file,
                    layer=slot.layer,
                    expert=slot.expert,
                    projection=slot.projection,
                    role=str(slot.role),
                    shape=(pair.source.shape[0], pair.source.shape[1]),
                    dtype=pair.source.dtype,
                    sums=sums,
                )
                return stats, counts

            yield from _with_histograms(map_bounded(work, self.pairs, self.jobs))

    def _advanced(self, num_bytes: int) -> None:
        if self.stop.signum is not None:
            raise Interrupted(self.stop.signum)
        self.reporter(Advanced(num_bytes=num_bytes))


def open_measuring(
    target: Path,
    source: Path,
    *,
    sample: str | None,
    jobs: int | None,
    reporter: Reporter,
    stop: StopToken,
) -> Measuring:
    """Read the headers of both folders and pair their weights by name.

    Args:
        target: A folder in the layout ``mxfp4-pack-quantized``, of any tool.
        source: The checkpoint it was made from.
        sample: ``N/T``; ``None`` takes everything, of a large source a part.
        jobs: Threads; ``None`` chooses.
        reporter: Told about progress and about what cannot be measured.
        stop: Set from a signal handler to end early.

    Raises:
        UsageError: No weight can be measured, or ``sample`` makes no sense.
        SourceError: A folder is damaged.
        LocalError: It cannot be read.
        VerificationError: The manifest is malformed.
    """
    if sample is not None:
        Sample.parse(sample)
    stored, original = open_checkpoint(target), open_checkpoint(source)
    manifest = _manifest(target)
    pairs, lonely = pair_weights(stored, original, manifest)
    if not pairs:
        raise UsageError(
            f"{target}: none of its {len(lonely)} packed weights is in {source}"
            if lonely
            else f"{target}: no packed weights (X{PACKED_SUFFIX} beside X{SCALE_SUFFIX})",
            hint="give the artifact first and the checkpoint it was made from as --source",
            code="nothing-to-measure",
        )
    digest = source_identity(original.files, len(original.tensors)).digest
    _say_what_differs(reporter, manifest, digest, lonely)
    chosen = Sample.choose(sample, sum(pair.source.size for pair in pairs))
    header = Header(
        tool=f"mxconvert {__version__}",
        artifact=manifest_id(target),
        scale_rule=None if manifest is None else manifest.format.scale_rule,
        source=digest,
        sample=f"{chosen.number}/{chosen.parts}" if chosen.parts > 1 else None,
    )
    return Measuring(
        stored,
        original,
        [pair for place, pair in enumerate(pairs) if chosen.takes(place)],
        header,
        _classifier(stored, manifest),
        reporter,
        stop,
        jobs or default_jobs(),
    )


def pair_weights(
    stored: Checkpoint, original: Checkpoint, manifest: Manifest | None
) -> tuple[list[Pair], list[str]]:
    """Return what can be measured, in byte order, and the packed weights that cannot."""
    pairs, lonely = [], []
    recipe = recipe_of(original, manifest) or DENSE
    sources = logical_tensors(original.tensors, original.config, recipe).tensors
    for name, codes in stored.tensors.items():
        module = name.removesuffix(PACKED_SUFFIX)
        if module == name:
            continue
        scales = stored.tensors.get(module + SCALE_SUFFIX)
        source = sources.get(module + ".weight")
        if scales is not None and source is not None and _fits(codes, scales, source):
            pairs.append(Pair(codes, scales, source))
        else:
            lonely.append(name)
    return sorted(pairs, key=lambda pair: (pair.codes.file, pair.codes.offset)), lonely


def _fits(codes: TensorInfo, scales: TensorInfo, source: TensorInfo) -> bool:
    readable = source.dtype in ITEM_SIZES or source.scale is not None
    if not readable or len(source.shape) != _RANK:
        return False
    rows, columns = source.shape
    expected = ((rows, columns // 2), (rows, columns // BLOCK_SIZE))
    whole = columns % BLOCK_SIZE == 0 and codes.dtype == scales.dtype == _BYTE
    return whole and (codes.shape, scales.shape) == expected


def _manifest(target: Path) -> Manifest | None:
    path = target / MANIFEST_NAME
    return parse_manifest(path.read_bytes(), MANIFEST_NAME) if path.exists() else None


def _classifier(stored: Checkpoint, manifest: Manifest | None) -> Classifier:
    recipe = recipe_of(stored, manifest) or DENSE
    return recipe.classifier(stored.config)


def _say_what_differs(
    reporter: Reporter, manifest: Manifest | None, digest: str, lonely: list[str]
) -> None:
    if manifest is not None and manifest.source.digest != digest:
        message = "the source is not the checkpoint that the artifact was made from"
        reporter(Notice(severity="warning", code="other-source", message=message))
    if lonely:
        message = (
            f"{len(lonely)} packed weights are not measured, since the source has no tensor of "
            f"their name and shape, first {lonely[0]!a}"
        )
        reporter(Notice(severity="warning", code="not-measured", message=message))


def _not_finite(pair: Pair) -> VerificationError:
    return VerificationError(
        f"{pair.codes.file}: tensor {pair.codes.name!r}: it or its source {pair.source.name!r} "
        "holds values that are not finite",
        hint="mxconvert verify says where",
        code="not-finite",
    )


def _with_histograms(results: Iterable[tuple[TensorStats, Counts]]) -> Iterator[Record]:
    for file, group in itertools.groupby(results, key=lambda result: result[0].file):
        total = Counts()
        for stats, counts in group:
            total.codes += counts.codes
            total.scales += counts.scales
            yield stats
        scales = {byte: count for byte, count in enumerate(total.scales.tolist()) if count}
        yield Histograms(file=file, codes=tuple(total.codes.tolist()), scales=scales)
