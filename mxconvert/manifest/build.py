"""From a finished run to its manifest: pure functions of the plan and the digests."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any, TypeGuard

from mxconvert import __version__
from mxconvert.manifest.canonical import encode_canonical
from mxconvert.manifest.records import (
    PLAIN_FORMAT,
    ArtifactTotals,
    FileEntry,
    FormatSpec,
    Generator,
    Manifest,
    ModelFacts,
    OptionValue,
    SourceIdentity,
    SourceRecord,
    TensorRecord,
    Treatment,
)
from mxconvert.safetensors_format import is_utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mxconvert.model import Item, OutputFile, Plan, SourceFile, Totals

SCALES_OF_SOURCE = "source"
"""Scale rule of an artifact whose weights were MXFP4 before."""

_OF_QUANTIZATION = ("scale_rule", "scope", "activations", "from_int4")

GENERATOR = Generator(name="mxconvert", version=__version__)


def source_identity(files: Iterable[SourceFile], num_tensors: int) -> SourceIdentity:
    """Return the identity of a checkpoint: of its weight files' names, sizes and headers."""
    found = sorted(files, key=lambda file: file.path)
    rows = [[file.path, file.size, file.header_sha256] for file in found]
    return SourceIdentity(
        digest=hashlib.sha256(encode_canonical(rows)).hexdigest(),
        files=len(rows),
        tensors=num_tensors,
        size_bytes=sum(file.size for file in found),
    )


def options_of(plan: Plan) -> dict[str, OptionValue]:
    """Return a plan's options as JSON values, ``None`` for those that have no effect."""
    options = plan.options

    def plain(value: str | int | tuple[str, ...] | None) -> OptionValue:
        if isinstance(value, tuple):
            return [str(item) for item in value]
        return str(value) if isinstance(value, str) else value

    left_out = _OF_QUANTIZATION if plan.plain else ()
    return {
        item.name: None if item.name in left_out else plain(getattr(options, item.name))
        for item in dataclasses.fields(options)
    }


def build_manifest(
    *,
    plan: Plan,
    source: SourceIdentity,
    files: Iterable[FileEntry],
    config: Mapping[str, Any],
    generator: Generator = GENERATOR,
) -> Manifest:
    """Assemble the manifest of a finished artifact.

    Args:
        plan: What was written.
        source: What it was made from, see `source_identity`.
        files: An entry for every file of the artifact except the manifest itself: the
            weights, config, index, sidecars, card and the tensor list.
        config: The source's config.json; only architectures and model_type are taken.
        generator: Overridden by tests that pin bytes.
    """
    entries = tuple(sorted(files, key=lambda entry: entry.path))
    return Manifest(
        generator=generator,
        source=source,
        options=options_of(plan),
        format=format_of(plan),
        model=_model_facts(plan, config),
        totals=ArtifactTotals(
            tensors=plan.num_tensors,
            tensor_bytes=plan.total_size,
            files=len(entries),
            file_bytes=sum(entry.size for entry in entries),
            quantized=_treatment(plan.quantized),
            copied=_treatment(plan.copied),
        ),
        files=entries,
    )


def format_of(plan: Plan) -> FormatSpec:
    """Return how weights are stored."""
    return PLAIN_FORMAT if plan.plain else FormatSpec(scale_rule=_scale_rule(plan))


def _scale_rule(plan: Plan) -> str:
    """Return how scales were chosen: if all of them came with the source, nobody knows."""
    made = plan.quantized.tensors or not plan.repacked
    return str(plan.options.scale_rule) if made else SCALES_OF_SOURCE


def _model_facts(plan: Plan, config: Mapping[str, Any]) -> ModelFacts:
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    return ModelFacts(
        architectures=tuple(
            name
            for name in (architectures if isinstance(architectures, list) else [])
            if _is_text(name)
        ),
        model_type=model_type if _is_text(model_type) else None,
        recipe=plan.recipe,
        num_experts=plan.num_experts,
    )


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a config's value is text that UTF-8 can hold (JSON can escape what it cannot)."""
    return isinstance(value, str) and is_utf8(value)


def _treatment(totals: Totals) -> Treatment:
    return Treatment(
        source_tensors=totals.tensors,
        source_bytes=totals.source_bytes,
        output_bytes=totals.output_bytes,
    )


def tensor_records(
    file: OutputFile, outputs: Mapping[str, str], sources: Mapping[str, str]
) -> Iterator[TensorRecord]:
    """Yield the records of one weight file in the order of their bytes.

    Args:
        file: The planned file.
        outputs: XXH3-128 of each output tensor, by its name.
        sources: XXH3-128 of what each was made from, by the item's name, and of scales by
            their names in the source.
    """
    for item in file.items:
        made_from = tuple(_source_records(item, sources))
        for tensor in item.outputs:
            yield TensorRecord(
                tensor.name,
                file.name,
                tensor.dtype,
                tensor.shape,
                file.header_size + tensor.begin,
                file.header_size + tensor.end,
                outputs[tensor.name],
                item.layer,
                None if item.expert is None else (item.expert, item.expert),
                made_from,
            )


def _source_records(item: Item, digests: Mapping[str, str]) -> Iterator[SourceRecord]:
    for part in item.source_tensors:
        stored, view = part.stored, part.view
        yield SourceRecord(
            stored.name,
            stored.dtype,
            stored.shape,
            digests[part.name],
            selection=view.selection if view else None,
            axes=view.axes if view else None,
        )
