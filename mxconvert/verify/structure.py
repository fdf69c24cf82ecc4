"""The structure level: headers, tensor list, index and config against each other.

Reads headers only. Files are taken one after the other and of each only what does not
fit is remembered, so that memory stays small beside a model of half a million tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxconvert import safetensors_format as st
from mxconvert.errors import SourceError
from mxconvert.model import BLOCK_SIZE, PACKED_SUFFIX, SCALE_SUFFIX, FileRole
from mxconvert.patterns import names_asked_for
from mxconvert.verify.report import Check, Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mxconvert.manifest import FileEntry, TensorRecord
    from mxconvert.model import TensorInfo
    from mxconvert.verify.config import Declaration
    from mxconvert.verify.place import Place

PACKED, SCALE = PACKED_SUFFIX, SCALE_SUFFIX
WEIGHT = ".weight"
_LINEAR_RANK = 2
_BYTE = "U8"


def read_header(place: Place, path: str, collector: Collector) -> list[TensorInfo] | None:
    """Return a weight file's tensors in order of offset, ``None`` after a finding."""
    try:
        size = place.files[path].size
        length = st.header_length(place.read_range(path, 0, st.PREFIX_SIZE), path, size)
        raw = place.read_range(path, st.PREFIX_SIZE, st.PREFIX_SIZE + length)
        tensors = st.parse_header(raw, path, size)
        metadata = st.read_metadata(raw, path)
    except SourceError as error:
        code = "bad-header" if error.code == "source" else error.code
        collector.fail(Check.STRUCTURE, code, error.message, path=path)
        return None
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        collector.fail(Check.FILES, "unreadable", message, path=path)
        return None
    if metadata.get("format") != "pt":
        collector.fail(
            Check.STRUCTURE,
            "format-pt",
            f"{path}: the header's format",
            path=path,
            expected="'pt'",
            found=repr(metadata.get("format")),
        )
    return tensors


@dataclass(slots=True)
class _Half:
    """The codes or the scales of a weight whose other half was not seen yet."""

    file: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class StructureCheck:
    """What has been seen of an artifact's weight files so far.

    Attributes:
        collector: Receives findings.
        declaration: What config.json says, if it could be read.
        index: The index's weight_map, if it could be read.
        foreign: Whether another tool made it: a scale may stand in another file than its
            codes, embeddings need not be ignored, unused ignore entries are only noted.
        tied_head: Whether ``lm_head`` may be ignored though it is not stored.
        plain: Whether nothing of it may be packed.
        part: Whether it is a part of an artifact, whose config.json speaks of the whole.
    """

    collector: Collector
    declaration: Declaration | None
    index: Mapping[str, str] | None
    foreign: bool = False
    tied_head: bool = False
    plain: bool = False
    part: bool = False
    total_bytes: int = 0
    _owner: dict[str, str] = field(default_factory=dict)
    _codes: dict[str, _Half] = field(default_factory=dict)
    _scales: dict[str, _Half] = field(default_factory=dict)

    def fail(self, code: str, path: str, tensor: str, what: str, **values: object) -> None:
        """Record a finding about a tensor."""
        message = f"{path}: tensor {tensor!r}: {what}"
        self.collector.fail(Check.STRUCTURE, code, message, path=path, tensor=tensor, **values)

    # ------------------------------------------------------------------- one file

    def add_file(self, path: str, tensors: Iterable[TensorInfo]) -> None:
        """Take the tensors of one file's header."""
        self.collector.look(path, Check.STRUCTURE)
        for tensor in tensors:
            self.collector.count("tensors")
            self.total_bytes += tensor.size
            self._check_place(path, tensor)
            self._check_pair(path, tensor)
            self._check_declared(path, tensor)

    def _check_place(self, path: str, tensor: TensorInfo) -> None:
        other = self._owner.setdefault(tensor.name, path)
        if other is not path:
            self.fail("duplicate-tensor", path, tensor.name, f"stored in {other} as well")
        elif self.index is not None:
            indexed = self.index.get(tensor.name)
            if indexed is None:
                self.fail("not-in-index", path, tensor.name, "the index does not list it")
            elif indexed != path:
                self.fail(
                    "index-file",
                    path,
                    tensor.name,
                    "the index names another file",
                    expected=path,
                    found=indexed,
                )

    def _check_pair(self, path: str, tensor: TensorInfo) -> None:
        name, half = tensor.name, _Half(path, tensor.shape)
        if name.endswith(PACKED):
            module, mine, others = name.removesuffix(PACKED), self._codes, self._scales
        elif name.endswith(SCALE):
            module, mine, others = name.removesuffix(SCALE), self._scales, self._codes
        else:
            return
        if self.plain:
            self.fail("packed-but-plain", path, name, "the manifest says that nothing is packed")
        if tensor.dtype != _BYTE:
            self.fail("dtype", path, name, "the dtype", expected=_BYTE, found=tensor.dtype)
        other = others.pop(module, None)
        if other is None:
            mine[module] = half
        else:
            codes, scales = (half, other) if name.endswith(PACKED) else (other, half)
            self._check_shapes(module, codes, scales)

    def _check_shapes(self, module: str, codes: _Half, scales: _Half) -> None:
        *rows, packed = codes.shape or (0,)
        expected = (*rows, packed * 2 // BLOCK_SIZE)
        if packed * 2 % BLOCK_SIZE or scales.shape != expected:
            self.fail(
                "scale-shape",
                scales.file,
                module + SCALE,
                f"the shape beside codes of shape {list(codes.shape)}",
                expected=list(expected),
                found=list(scales.shape),
            )
        if codes.file != scales.file and not self.foreign:
            self.fail("split-pair", scales.file, module + SCALE, f"its codes are in {codes.file}")

    def _check_declared(self, path: str, tensor: TensorInfo) -> None:
        if self.declaration is None:
            return
        name = tensor.name
        self.declaration.see(name.rpartition(".")[0])
        if name.endswith(PACKED):
            module = name.removesuffix(PACKED)
            if any(map(self.declaration.ignores, names_asked_for(module))):
                self.fail("packed-but-ignored", path, name, "config.json ignores its module")
            elif not self.declaration.targets(module):
                self.fail("packed-but-no-target", path, name, "config.json does not target it")
        elif name.endswith(WEIGHT) and len(tensor.shape) == _LINEAR_RANK:
            module = name.removesuffix(WEIGHT)
            exempt = self.foreign and "embed" in module
            if not exempt and not self._is_left_alone(module):
                what = "not packed, but config.json does not ignore its module"
                self.fail("not-declared", path, name, what)

    def _is_left_alone(self, module: str) -> bool:
        assert self.declaration is not None  # noqa: S101  (the caller asked)
        names = (module,) if self.foreign else names_asked_for(module)
        return all(map(self.declaration.ignores, names))

    # ------------------------------------------------------------------- all files

    def finish(self, index_path: str, unread: set[str]) -> None:
        """Report what only the whole shows.

        Args:
            index_path: What messages call the index.
            unread: Weight files whose headers could not be read; what the index says
                about them is not judged.
        """
        for module, half in self._codes.items():
            name, lost = module + PACKED, module + SCALE
            if not (unread and self.foreign):
                self.fail("missing-scale", half.file, name, f"{lost!r} is stored nowhere")
        for module, half in self._scales.items():
            if not (unread and self.foreign):
                self.fail("missing-codes", half.file, module + SCALE, "it has no weight_packed")
        for name, file in (self.index or {}).items():
            if name not in self._owner and file not in unread:
                message = f"{index_path}: tensor {name!r} is listed in {file}, but stored nowhere"
                self.collector.fail(
                    Check.STRUCTURE, "not-stored", message, path=index_path, tensor=name
                )
        if self.declaration is not None and not unread and not self.part:
            self._check_stale()

    def _check_stale(self) -> None:
        assert self.declaration is not None  # noqa: S101  (the caller asked)
        for entry in self.declaration.stale():
            if entry == "lm_head" and self.tied_head:
                continue
            message = f"config.json: the ignore entry {entry!r} matches no stored module"
            if self.foreign:
                self.collector.note("stale-ignore", message, "config.json")
            else:
                self.collector.fail(Check.CONFIG, "stale-ignore", message, path="config.json")


def compare_records(
    entry: FileEntry,
    records: Iterable[TensorRecord],
    tensors: Iterable[TensorInfo],
    collector: Collector,
) -> None:
    """Compare a header with the tensor list, and experts with the file's role."""
    stored = {tensor.name: tensor for tensor in tensors}

    def fail(code: str, name: str, what: str, **values: object) -> None:
        message = f"{entry.path}: tensor {name!r}: {what}"
        collector.fail(Check.STRUCTURE, code, message, path=entry.path, tensor=name, **values)

    for record in records:
        tensor = stored.pop(record.name, None)
        if tensor is None:
            fail("not-in-file", record.name, "the tensor list names it, the file lacks it")
            continue
        end = tensor.offset + tensor.size
        expected = (record.dtype, list(record.shape), record.begin, record.end)
        found = (tensor.dtype, list(tensor.shape), tensor.offset, end)
        if expected != found:
            fail(
                "list-differs",
                record.name,
                "header and tensor list",
                expected=expected,
                found=found,
            )
        if not _fits_role(entry, record.experts):
            what = f"holds experts {record.experts}, the file's role is {entry.role}"
            fail("role", record.name, f"{what} {entry.experts or ''}".rstrip())
    for name in stored:
        fail("not-in-list", name, "the file stores it, the tensor list lacks it")


def _fits_role(entry: FileEntry, experts: tuple[int, int] | None) -> bool:
    if entry.role is FileRole.MIXED:
        return True
    if entry.experts is None or experts is None:
        return entry.experts is None and experts is None
    return entry.experts[0] <= experts[0] and experts[1] <= entry.experts[1]
