"""Running the numeric level: which weights, against which source, in which way."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mxconvert.events import Started
from mxconvert.fp8 import FP8_DTYPES
from mxconvert.manifest import (
    PLAIN_FORMAT,
    SCALES_OF_SOURCE,
    SourceRecord,
    TensorRecord,
    source_identity,
)
from mxconvert.model import BLOCK_SIZE
from mxconvert.plan.int4 import SHAPE_SUFFIX, int4_modules
from mxconvert.plan.scales import is_left_scale
from mxconvert.provenance import Coverage
from mxconvert.quantize import Quantizer, load_backend
from mxconvert.recipes import nests_quantization
from mxconvert.safetensors_format import num_elements
from mxconvert.sample import Sample
from mxconvert.source import SourceReader, open_checkpoint
from mxconvert.statistics import ITEM_SIZES
from mxconvert.verify.documents import CONFIG_NAME
from mxconvert.verify.measure import ErrorCheck
from mxconvert.verify.numeric import ArtifactReader, NumericCheck, Unit, units_of
from mxconvert.verify.report import Check, Collector
from mxconvert.verify.structure import PACKED, SCALE, WEIGHT
from mxconvert.workers import default_jobs, run_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from mxconvert.events import Reporter
    from mxconvert.folder import Folder
    from mxconvert.manifest import Manifest
    from mxconvert.model import Checkpoint, TensorInfo
    from mxconvert.verify.options import VerifyOptions

_BACKEND = "numpy"
_TOP, _TEXT = "at the top level", "in text_config"
_NOTHING_QUANTIZED = (SCALES_OF_SOURCE, PLAIN_FORMAT.scale_rule)
_PACKED_FORMAT = "mxfp4-pack-quantized"


@dataclass(slots=True)
class SourceRun:
    """Everything that the comparisons with a source share."""

    folder: Folder
    options: VerifyOptions
    collector: Collector
    reporter: Reporter

    def against_manifest(
        self, manifest: Manifest, records: Callable[[], Iterator[TensorRecord]]
    ) -> None:
        """Make the weights of an mxconvert artifact again.

        Args:
            manifest: What the artifact is.
            records: Yields the tensor list, without the files that cannot be read.

        Raises:
            SourceError: The source is damaged, or changes while it is read.
            LocalError: The source cannot be read.
        """
        unindexed = manifest.options.get("unindexed")
        checkpoint = open_checkpoint(
            self._source, unindexed=unindexed if isinstance(unindexed, str) else None
        )
        self._compare_identity(manifest, checkpoint)
        if manifest.format != PLAIN_FORMAT:
            self._compare_place(checkpoint)
        totals = manifest.totals
        sample = self._sample(totals.quantized.source_bytes + totals.copied.source_bytes)
        quantizer = self._quantizer(manifest)
        used = Coverage()

        def units() -> Iterator[Unit]:
            for position, unit in enumerate(units_of(records())):
                for record in unit.records:
                    used.add(record)
                if sample.takes(position):
                    yield unit

        with ExitStack() as stack:
            check, measure = self._checks(stack, checkpoint, quantizer)

            def work(unit: Unit) -> None:
                if unit.is_quantized and quantizer is None:
                    source = check.source_of(unit.records[0], packed=True)
                    if source is not None:
                        measure.check(unit, source)
                else:
                    check.check(unit)

            self._run(work, units(), checkpoint, sample)
        self.collector.error = measure.summary()
        self._report_lost(checkpoint, used, plain=manifest.format == PLAIN_FORMAT)

    def against_names(self, tensors: Iterable[TensorInfo]) -> None:
        """Compare another tool's folder with the source's tensors of the same names.

        Raises:
            SourceError: The source is damaged, or changes while it is read.
            LocalError: The source cannot be read.
        """
        checkpoint = open_checkpoint(self._source)
        units = list(_foreign_units(tensors))
        size = sum(tensor.size for tensor in checkpoint.tensors.values())
        sample = self._sample(size)
        outcomes: Counter[str] = Counter()
        with ExitStack() as stack:
            check, measure = self._checks(stack, checkpoint, None)

            def work(unit: Unit) -> None:
                source = checkpoint.tensors.get(unit.records[0].sources[0].name)
                outcomes[_compare_foreign(unit, source, check, measure, self.collector)] += 1

            chosen = (unit for place, unit in enumerate(units) if sample.takes(place))
            self._run(work, chosen, checkpoint, sample)
        self.collector.error = measure.summary()
        if outcomes["other"]:
            self.collector.skip(
                f"{outcomes['other']} tensors were not compared: the source has no tensor of "
                "their name, or one of another shape or dtype"
            )

    # ------------------------------------------------------------------------- parts

    @property
    def _source(self) -> Path:
        if self.options.source is None:
            raise AssertionError("options were not checked")
        return self.options.source

    def _sample(self, size: int) -> Sample:
        sample = Sample.choose(self.options.sample, size)
        if sample.parts > 1:
            self.collector.skip(
                f"only part {sample.number} of {sample.parts} of the weights was compared with "
                f"the source; --sample N/{sample.parts} selects another part"
            )
        return sample

    def _quantizer(self, manifest: Manifest) -> Quantizer | None:
        if manifest.format.scale_rule in _NOTHING_QUANTIZED:
            return None
        if manifest.format.name == _PACKED_FORMAT:
            try:
                return Quantizer(load_backend(_BACKEND), manifest.format.scale_rule)
            except ValueError:
                pass
        self.collector.skip(
            f"format {manifest.format.name} with scale rule {manifest.format.scale_rule} is not "
            "known here: the error of its weights was measured, they were not made again"
        )
        return None

    def _compare_identity(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        found = source_identity(checkpoint.files, len(checkpoint.tensors)).digest
        if found != manifest.source.digest:
            self.collector.fail(
                Check.MANIFEST,
                "other-source",
                "the source is not the checkpoint that the artifact was made from: its digest",
                expected=manifest.source.digest,
                found=found,
            )

    def _compare_place(self, checkpoint: Checkpoint) -> None:
        """Compare where both configs declare the quantization, since engines look there."""
        try:
            config = json.loads(self.folder.read(CONFIG_NAME))
        except (OSError, ValueError, RecursionError):
            return  # reported as what it is
        found, expected = (
            _TEXT if nests_quantization(each) else _TOP
            for each in (config if isinstance(config, dict) else {}, checkpoint.config)
        )
        if found != expected:
            self.collector.fail(
                Check.CONFIG,
                "quantization-config",
                f"{CONFIG_NAME}: the place of quantization_config",
                path=CONFIG_NAME,
                expected=expected,
                found=found,
            )

    def _checks(
        self, stack: ExitStack, checkpoint: Checkpoint, quantizer: Quantizer | None
    ) -> tuple[NumericCheck, ErrorCheck]:
        files = ArtifactReader(self.folder)
        reader = stack.enter_context(SourceReader(checkpoint.root, checkpoint.files))
        measure = ErrorCheck(
            files,
            reader,
            load_backend(_BACKEND),
            self.collector,
            self.reporter,
            self.options.max_error,
        )
        check = NumericCheck(
            files=files,
            checkpoint=checkpoint,
            reader=reader,
            quantizer=quantizer,
            collector=self.collector,
            reporter=self.reporter,
        )
        return check, measure

    def _run(
        self,
        work: Callable[[Unit], None],
        units: Iterable[Unit],
        checkpoint: Checkpoint,
        sample: Sample,
    ) -> None:
        size = sum(tensor.size for tensor in checkpoint.tensors.values()) // sample.parts
        self.reporter(Started(what="compare with the source", total_bytes=size, total_files=0))
        run_bounded(work, units, self.options.jobs or default_jobs())

    def _report_lost(self, checkpoint: Checkpoint, used: Coverage, *, plain: bool) -> None:
        left, tensors = used.left(checkpoint.tensors), checkpoint.tensors
        declares_none = plain or any(t.dtype in FP8_DTYPES for t in tensors.values())
        dropped = [name for name in left if declares_none and is_left_scale(name)]
        shapes = {module + SHAPE_SUFFIX for module in int4_modules(tensors)}
        for name, count in left.items():
            if name not in dropped and name not in shapes:
                total = num_elements(tensors[name].shape)
                what = "" if count == total else f" {count} of its {total} elements:"
                message = f"source tensor {name!r}:{what} nothing in the artifact was made from it"
                self.collector.fail(Check.NUMERIC, "lost-tensor", message, tensor=name)
        if dropped:
            message = (
                f"{len(dropped)} scales of activations or the KV cache in the source have no use "
                f"in the artifact, such as {dropped[0]!r}"
            )
            self.collector.note("dropped-scale", message)


def _compare_foreign(
    unit: Unit,
    source: TensorInfo | None,
    check: NumericCheck,
    measure: ErrorCheck,
    collector: Collector,
) -> str:
    record = unit.records[0]
    if source is not None and unit.packed:
        scales = unit.records[1]
        blocks, columns = scales.end - scales.begin, BLOCK_SIZE * scales.shape[-1]
        item = ITEM_SIZES.get(source.dtype)
        if item is not None and source.size == blocks * BLOCK_SIZE * item:
            shape = (blocks * BLOCK_SIZE // max(columns, 1), columns)
            measure.check(unit, replace(source, shape=shape))
            return "measured"
    elif source is not None and (record.dtype, record.shape) == (source.dtype, source.shape):
        try:
            check.compare_copy(unit, source)
        except OSError as error:
            message = f"{record.file}: cannot be read: {error.strerror}"
            collector.fail(Check.NUMERIC, "unreadable", message, path=record.file)
        collector.count("tensors_compared")
        return "compared"
    return "other"


def _foreign_units(tensors: Iterable[TensorInfo]) -> Iterator[Unit]:
    """Pair codes and scales wherever they stand; everything else is a copy."""
    scales = {}
    rest = []
    for tensor in tensors:
        if tensor.name.endswith(SCALE):
            scales[tensor.name.removesuffix(SCALE)] = tensor
        else:
            rest.append(tensor)
    for tensor in sorted(rest, key=lambda tensor: (tensor.file, tensor.offset)):
        module = tensor.name.removesuffix(PACKED)
        if module == tensor.name:
            yield Unit((_record(tensor, tensor.name),))
        elif module in scales:
            source = module + WEIGHT
            yield Unit((_record(tensor, source), _record(scales[module], source)))


def _record(tensor: TensorInfo, source: str) -> TensorRecord:
    end = tensor.offset + tensor.size
    made_from = SourceRecord(source, tensor.dtype, tensor.shape, "")
    return TensorRecord(
        tensor.name,
        tensor.file,
        tensor.dtype,
        tensor.shape,
        tensor.offset,
        end,
        "",
        None,
        None,
        (made_from,),
    )
