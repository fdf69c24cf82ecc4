"""The manifest as bytes, and bytes as a manifest.

`parse_manifest` is the edge where untrusted JSON becomes records: after it, every
path is safe, every digest has its length and the form is canonical.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from mxconvert.digest import ChunkDigest
from mxconvert.errors import VerificationError
from mxconvert.manifest.canonical import decode_strict, encode_canonical
from mxconvert.manifest.fields import Fields, bad
from mxconvert.manifest.paths import TENSORS_NAME, path_fault, refuse_clashes
from mxconvert.manifest.records import (
    SCHEMA_VERSION,
    ArtifactTotals,
    FileEntry,
    FormatSpec,
    Generator,
    Manifest,
    ModelFacts,
    OptionValue,
    SourceIdentity,
    Span,
    Treatment,
)
from mxconvert.model import FileRole

CRC_DIGITS, XXH_DIGITS, SHA_DIGITS = 16, 32, 64
_UPGRADE = "use a version of mxconvert that knows it"


def artifact_id(manifest_bytes: bytes) -> str:
    """Return the artifact's id: the SHA-256 of its manifest file, hexadecimal."""
    return hashlib.sha256(manifest_bytes).hexdigest()


# --------------------------------------------------------------------------- writing


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest file's bytes.

    Raises:
        ValueError: A float or invalid Unicode in options, extensions or names.
    """
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "generator": asdict(manifest.generator),
        "source": asdict(manifest.source),
        "options": dict(manifest.options),
        "format": asdict(manifest.format),
        "model": asdict(manifest.model),
        "totals": asdict(manifest.totals),
        "chunk_size": manifest.chunk_size,
        "files": [file_json(entry) for entry in manifest.files],
    }
    if manifest.extensions:
        document["extensions"] = dict(manifest.extensions)
    return encode_canonical(document)


def file_json(entry: FileEntry) -> dict[str, Any]:
    """Return the JSON of a file's entry."""
    return {
        "path": entry.path,
        "size": entry.size,
        "role": entry.role.value,
        "experts": entry.experts,
        "layers": entry.layers,
        "sha256": entry.sha256,
        "crc64nvme": entry.crc64nvme,
        "chunks": {
            "crc64nvme": [chunk.crc64nvme for chunk in entry.chunks],
            "xxh3_128": [chunk.xxh3_128 for chunk in entry.chunks],
        },
    }


# --------------------------------------------------------------------------- reading


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest; no file it names is touched.

    Args:
        data: The manifest file's bytes.
        where: What messages call it, usually its path.

    Raises:
        VerificationError: Not a manifest of a known version in canonical form, an unsafe
            or repeated path, or sizes and digests that contradict each other; the
            message names the entry.
    """
    return _parse_document(parse_canonical(data, where))


def parse_canonical(data: bytes, where: str) -> Fields:
    """Return the members of a JSON object in canonical form.

    Raises:
        VerificationError: It is not one.
    """
    try:
        document = decode_strict(data)
    except ValueError as error:
        raise bad(where, f"not a manifest: {error}") from error
    fields = Fields(document, where)
    try:
        canonical = encode_canonical(document)
    except ValueError as error:
        raise bad(where, f"not valid Unicode: {error}") from error
    if canonical != data:
        raise bad(where, "not in canonical form (sorted keys, no white space, one final newline)")
    return fields


def _parse_document(fields: Fields) -> Manifest:
    version = fields.count("schema_version")
    if version != SCHEMA_VERSION:
        raise VerificationError(
            f"{fields.where}: schema_version {version}, expected {SCHEMA_VERSION}",
            hint=_UPGRADE,
            code="unknown-schema",
        )
    chunk_size = fields.count("chunk_size", minimum=1)
    manifest = Manifest(
        generator=_generator(fields.sub("generator")),
        source=_source(fields.sub("source")),
        options=_options(fields.sub("options")),
        format=_format(fields.sub("format")),
        model=_model(fields.sub("model")),
        totals=_totals(fields.sub("totals")),
        files=tuple(
            file_fields(entry, chunk_size) for entry in fields.objects("files", label="path")
        ),
        chunk_size=chunk_size,
        extensions=fields.sub("extensions").rest() if fields.has("extensions") else {},
    )
    fields.done()
    _check_files(manifest, fields.where)
    return manifest


def _generator(fields: Fields) -> Generator:
    return fields.end(Generator(name=fields.text("name"), version=fields.text("version")))


def _source(fields: Fields) -> SourceIdentity:
    return fields.end(
        SourceIdentity(
            digest=fields.hex("digest", SHA_DIGITS),
            files=fields.count("files"),
            tensors=fields.count("tensors"),
            size_bytes=fields.count("size_bytes"),
        )
    )


def _options(fields: Fields) -> dict[str, OptionValue]:
    options = fields.rest()
    for name, value in options.items():
        plain = value is None or isinstance(value, (str, int))
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not plain and not texts:
            raise bad(f"{fields.where}.{name}", f"{value!r} is not an option's value")
    return options


def _format(fields: Fields) -> FormatSpec:
    return fields.end(
        FormatSpec(
            name=fields.text("name"),
            quant_method=fields.text("quant_method"),
            element=fields.text("element"),
            block_size=fields.count("block_size", minimum=1),
            scale=fields.text("scale"),
            scale_bias=fields.count("scale_bias"),
            nibble_order=fields.text("nibble_order"),
            scale_rule=fields.text("scale_rule"),
        )
    )


def _model(fields: Fields) -> ModelFacts:
    return fields.end(
        ModelFacts(
            architectures=tuple(fields.texts("architectures")),
            model_type=fields.optional_text("model_type"),
            recipe=fields.text("recipe"),
            num_experts=fields.count("num_experts"),
        )
    )


def _totals(fields: Fields) -> ArtifactTotals:
    return fields.end(
        ArtifactTotals(
            tensors=fields.count("tensors"),
            tensor_bytes=fields.count("tensor_bytes"),
            files=fields.count("files"),
            file_bytes=fields.count("file_bytes"),
            quantized=_treatment(fields.sub("quantized")),
            copied=_treatment(fields.sub("copied")),
        )
    )


def _treatment(fields: Fields) -> Treatment:
    return fields.end(
        Treatment(
            source_tensors=fields.count("source_tensors"),
            source_bytes=fields.count("source_bytes"),
            output_bytes=fields.count("output_bytes"),
        )
    )


def file_fields(fields: Fields, chunk_size: int) -> FileEntry:
    """Read a file's entry.

    Raises:
        VerificationError: It is not one.
    """
    path = fields.text("path")
    fault = path_fault(path)
    if fault is not None:
        raise VerificationError(f"{fields.where}: unsafe path: {fault}", code="unsafe-path")
    size = fields.count("size")
    role = fields.text("role")
    if role not in set(FileRole):
        raise bad(fields.where, f"unknown role {role!r}; known: {', '.join(FileRole)}")
    experts = fields.span("experts")
    if (role == FileRole.EXPERTS) != (experts is not None):
        raise bad(fields.where, f"role {role} with experts {experts}")
    return fields.end(
        FileEntry(
            path=path,
            size=size,
            role=FileRole(role),
            sha256=fields.hex("sha256", SHA_DIGITS),
            crc64nvme=fields.hex("crc64nvme", CRC_DIGITS),
            chunks=_chunks(fields.sub("chunks"), -(-size // chunk_size)),
            experts=experts,
            layers=fields.span("layers"),
        )
    )


def _chunks(fields: Fields, expected: int) -> tuple[ChunkDigest, ...]:
    crcs = fields.hexes("crc64nvme", CRC_DIGITS)
    hashes = fields.hexes("xxh3_128", XXH_DIGITS)
    for name, values in (("crc64nvme", crcs), ("xxh3_128", hashes)):
        if len(values) != expected:
            raise bad(
                f"{fields.where}.{name}",
                f"{len(values)} chunk digests, the size needs {expected}",
            )
    return fields.end(tuple(map(ChunkDigest, hashes, crcs)))


def _check_files(manifest: Manifest, where: str) -> None:
    paths = [entry.path for entry in manifest.files]
    refuse_clashes(paths, where)
    if paths != sorted(paths):
        late = next(b for a, b in pairwise(paths) if b < a)
        raise bad(where, f"files are not sorted by path: {late!a} comes too late")
    lists = [entry.path for entry in manifest.files if entry.role is FileRole.TENSORS]
    if lists != [TENSORS_NAME]:
        raise bad(where, f"files of role tensors are {lists}, expected exactly {TENSORS_NAME!r}")
    _check_sums(manifest, where)
    for entry in manifest.files:
        _check_experts(entry.path, entry.experts, manifest.model.num_experts, where)


def _check_sums(manifest: Manifest, where: str) -> None:
    totals = manifest.totals
    for name, stated, found in (
        ("files", totals.files, len(manifest.files)),
        ("file_bytes", totals.file_bytes, sum(entry.size for entry in manifest.files)),
        (
            "tensor_bytes",
            totals.tensor_bytes,
            totals.quantized.output_bytes + totals.copied.output_bytes,
        ),
    ):
        if stated != found:
            raise bad(f"{where}: totals.{name}", f"says {stated}, the entries sum up to {found}")


def _check_experts(path: str, experts: Span | None, num_experts: int, where: str) -> None:
    if experts is not None and experts[1] >= num_experts:
        raise bad(
            f"{where}: {path!a}",
            f"experts {experts[0]} to {experts[1]}, but the model has {num_experts}",
        )
