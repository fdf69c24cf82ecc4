"""The records of a report file and their JSON lines.

A line is one JSON object without white space outside strings, ``type`` first, the other members
in the order of the fields. Reading refuses unknown and missing members and values of other types;
order and white space do not matter. Numbers are finite.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from mxconvert.errors import VerificationError, brief
from mxconvert.statistics.figures import Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCHEMA_VERSION = 1
CODES = 16
"""Values that a 4-bit code takes."""
_LAST_BYTE = 255
_RANK = 2
_EXPONENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line.

    Attributes:
        tool: Program and version that measured.
        artifact: Id of the artifact, ``None`` if it has no manifest.
        scale_rule: How scales were chosen, ``None`` if unknown.
        source: Digest of the checkpoint's identity, as in the manifest; ``None`` if unknown.
        sample: ``N/T`` if only the N-th of T parts of the weights was measured.
    """

    tool: str
    artifact: str | None = None
    scale_rule: str | None = None
    source: str | None = None
    sample: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """One quantized weight.

    Attributes:
        name: The source tensor.
        file: The output file that holds its codes.
        layer: Number of the layer, or ``None``.
        expert: Number of the routed expert, or ``None``.
        projection: The name's own word for the matrix (``gate_proj``, ``w1``), or ``None``.
        role: What it is in the model, as recipes say it.
        shape: ``(N, K)`` of the source tensor.
        dtype: Of the source tensor.
        sums: What was measured.
    """

    name: str
    file: str
    layer: int | None
    expert: int | None
    projection: str | None
    role: str
    shape: tuple[int, int]
    dtype: str
    sums: Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Histograms:
    """How often codes and scales occur in one output file.

    Attributes:
        file: The output file.
        codes: Elements per code 0 to 15.
        scales: Blocks per scale byte; bytes that do not occur are absent.
        sampled: Which part was counted, in words; ``None`` for all of it.
    """

    file: str
    codes: tuple[int, ...]
    scales: Mapping[int, int]
    sampled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last line; without it a file is cut off. ``tensors`` counts the tensor lines."""

    tensors: int


Record = TensorStats | Histograms
Line = Header | TensorStats | Histograms | End

_SUM_FIELDS = tuple(field.name for field in fields(Sums))


# --------------------------------------------------------------------------- writing


def to_json(line: Line) -> dict[str, Any]:
    """Return the JSON object of a line."""
    match line:
        case TensorStats():
            return _tensor_json(line)
        case Histograms():
            scales = {str(byte): line.scales[byte] for byte in sorted(line.scales)}
            return {
                "type": "histograms",
                "file": line.file,
                "codes": list(line.codes),
                "scales": scales,
                "sampled": line.sampled,
            }
        case Header():
            members = {field.name: getattr(line, field.name) for field in fields(line)}
            return {"type": "header", "schema_version": SCHEMA_VERSION, **members}
    return {"type": "end", "tensors": line.tensors}


def _tensor_json(line: TensorStats) -> dict[str, Any]:
    return {
        "type": "tensor",
        "name": line.name,
        "file": line.file,
        "layer": line.layer,
        "expert": line.expert,
        "projection": line.projection,
        "role": line.role,
        "shape": line.shape,
        "dtype": line.dtype,
        **{name: getattr(line.sums, name) for name in _SUM_FIELDS},
    }


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def encode(line: Line) -> bytes:
    """Return a line with its newline.

    Raises:
        ValueError: A number that is not finite, or text that is not valid Unicode.
    """
    return _ENCODER.encode(to_json(line)).encode() + b"\n"


# --------------------------------------------------------------------------- reading


def parse(line: bytes, where: str) -> Line:
    """Read one line.

    Args:
        line: With or without its newline.
        where: What messages call it.

    Raises:
        VerificationError: Not a line of this version of the format.
    """
    try:
        document = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise bad(where, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise bad(where, f"a JSON {type(document).__name__}, expected an object")
    members = _Members(document, where)
    kind = members.take("type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise bad(where, f"unknown type {brief(kind)}")
    result = reader(members)
    members.done()
    return result


def bad(where: str, what: str) -> VerificationError:
    """Return the error for a malformed report file."""
    return VerificationError(
        f"{where}: {what}",
        hint="measure again with `mxconvert report TARGET --source SRC`",
        code="bad-report",
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_sum(value: object) -> bool:
    return type(value) in {int, float} and 0 <= value < math.inf  # type: ignore[operator]


class _Members:
    """The members of one JSON object, each to be taken once."""

    __slots__ = ("_left", "_where")

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self._left = document
        self._where = where

    def take(self, key: str) -> Any:
        try:
            return self._left.pop(key)
        except KeyError:
            raise bad(self._where, f"{key} is missing") from None

    def refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        raise bad(self._where, f"{key} is {brief(value)}, expected {wanted}")

    def text(self, key: str) -> str:
        value = self.take(key)
        if type(value) is not str:
            self.refuse(key, value, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and type(value) is not str:
            self.refuse(key, value, "a string or null")
        return value

    def count(self, key: str) -> int:
        value = self.take(key)
        if not _is_count(value):
            self.refuse(key, value, "a whole number")
        return int(value)

    def optional_count(self, key: str) -> int | None:
        value = self.take(key)
        if value is not None and not _is_count(value):
            self.refuse(key, value, "a whole number or null")
        return value  # type: ignore[no-any-return]

    def counts(self, key: str, length: int) -> tuple[int, ...]:
        value = self.take(key)
        if type(value) is not list or len(value) != length or not all(map(_is_count, value)):
            self.refuse(key, value, f"{length} whole numbers")
        return tuple(value)

    def sum(self, key: str) -> float:
        value = self.take(key)
        if not _is_sum(value):
            self.refuse(key, value, "a finite number of at least 0")
        return float(value)

    def done(self) -> None:
        if self._left:
            raise bad(self._where, f"unknown members {brief(sorted(self._left))}")


def _read_header(members: _Members) -> Header:
    version = members.take("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        members.refuse("schema_version", version, f"{SCHEMA_VERSION}, the one known here")
    return Header(
        tool=members.text("tool"),
        artifact=members.optional_text("artifact"),
        scale_rule=members.optional_text("scale_rule"),
        source=members.optional_text("source"),
        sample=members.optional_text("sample"),
    )


def _read_tensor(members: _Members) -> TensorStats:
    rows, columns = members.counts("shape", _RANK)
    sums = _read_sums(members)
    if sums.elements != rows * columns:
        members.refuse("elements", sums.elements, f"{rows * columns}, as the shape says")
    if max(sums.flushed, sums.saturated) > sums.elements or sum(sums.exponents) > sums.blocks:
        members.refuse("flushed, saturated, exponents", sums, "no more than elements or blocks")
    return TensorStats(
        name=members.text("name"),
        file=members.text("file"),
        layer=members.optional_count("layer"),
        expert=members.optional_count("expert"),
        projection=members.optional_text("projection"),
        role=members.text("role"),
        shape=(rows, columns),
        dtype=members.text("dtype"),
        sums=sums,
    )


def _read_sums(members: _Members) -> Sums:
    below, floor, above = members.counts("exponents", _EXPONENTS)
    return Sums(
        elements=members.count("elements"),
        blocks=members.count("blocks"),
        sum_x2=members.sum("sum_x2"),
        sum_q2=members.sum("sum_q2"),
        sum_err2=members.sum("sum_err2"),
        max_abs_err=members.sum("max_abs_err"),
        flushed=members.count("flushed"),
        saturated=members.count("saturated"),
        exponents=(below, floor, above),
    )


def _read_histograms(members: _Members) -> Histograms:
    scales = members.take("scales")
    if type(scales) is not dict or not all(map(_is_scale, scales.items())):
        members.refuse("scales", scales, "counts by scale byte")
    return Histograms(
        file=members.text("file"),
        codes=members.counts("codes", CODES),
        scales={int(byte): count for byte, count in scales.items()},
        sampled=members.optional_text("sampled"),
    )


def _is_scale(item: tuple[str, object]) -> bool:
    byte, count = item
    plain = byte.isascii() and byte.isdigit() and str(int(byte)) == byte
    return plain and int(byte) <= _LAST_BYTE and _is_count(count)


def _read_end(members: _Members) -> End:
    return End(tensors=members.count("tensors"))


_READERS: dict[str, Callable[[_Members], Line]] = {
    "header": _read_header,
    "tensor": _read_tensor,
    "histograms": _read_histograms,
    "end": _read_end,
}
