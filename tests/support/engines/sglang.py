"""SGLang's rules, taken from its wheel and run without its kernels.

SGLang imports nowhere without its kernels, so the functions that decide are cut out of their files
and run by themselves: which names are ignored, which format is MXFP4, what an expert's tensor
is called in the model. What a model file does with that name is searched for in its text.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LAYERS = "sglang/srt/layers"
_SCHEMES = f"{_LAYERS}/quantization/compressed_tensors"
_MOST_EXPERTS = 1024
_FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
_RENAMES = re.compile(
    r"""^(?P<indent> *)name = name\.replace\("weight_packed", "weight"\)""", re.MULTILINE
)
_EXPERT = re.compile(r".*\bexperts\.\d+\.\w+\.(weight_packed|weight_scale)$")


class SGLang:
    """An unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self._root = root
        [info] = root.glob("sglang-*.dist-info")
        self.version = info.name.removesuffix(".dist-info").partition("-")[2]

    def functions(self, file: str, *names: str) -> dict[str, Any]:
        """Return functions or methods of a file, compiled by themselves, in one namespace."""
        tree = ast.parse((self._root / file).read_text())
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in names
        ]
        for node in found:
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        space: dict[str, Any] = {"re": re, "MappingProxyType": dict}
        code = compile(ast.Module(found, type_ignores=[]), file, "exec")
        exec(code, space)  # noqa: S102  (the engine's own rules)
        return space

    def wrongly_matched(self, kept: Iterable[str], ignore: list[str]) -> list[str]:
        """Return kept Linear modules that its rules do not ignore."""
        rules = self.functions(
            f"{_SCHEMES}/utils.py",
            "should_ignore_layer",
            "check_equal_or_regex_match",
            "_is_equal_or_regex_match",
        )
        stored = frozenset(kept)
        names = {fused_name(name, stored) for name in stored}
        should_ignore = rules["should_ignore_layer"]
        return sorted(name for name in names if not should_ignore(name, ignore, _FUSED))

    def is_mxfp4_moe(self, declared: dict[str, Any]) -> bool:
        """Whether it takes a layer's experts for MXFP4; it asks no name."""
        rule = self.functions(f"{_SCHEMES}/compressed_tensors.py", "_is_mxfp4_moe")
        return bool(rule["_is_mxfp4_moe"](SimpleNamespace(quant_format=declared["format"]), "any"))

    @cache  # noqa: B019  (one wheel in a process)
    def mapping(self, projections: tuple[str, str, str]) -> dict[str, str]:
        """Return what a parameter is called for each ``experts.<e>.<projection>.``."""
        rule = self.functions(
            f"{_LAYERS}/moe/fused_moe_triton/layer.py", "make_expert_params_mapping"
        )
        entries = rule["make_expert_params_mapping"](None, *projections, _MOST_EXPERTS)
        return {part: parameter for parameter, part, *_ in entries}

    def wanted(self, name: str, projections: tuple[str, str, str]) -> str:
        """Return what an expert's tensor is called in the model's parameters."""
        part = re.search(r"experts\.\d+\.\w+\.", name)
        parameter = self.mapping(projections).get(part[0]) if part else None
        return name.replace(part[0], parameter) if part and parameter else name

    @cache  # noqa: B019  (one wheel in a process)
    def parameters(self) -> frozenset[str]:
        """Names that its MXFP4 layer registers."""
        text = (self._root / f"{_LAYERS}/quantization/mxfp4.py").read_text()
        return frozenset(re.findall(r'register_parameter\("(\w+)"', text))

    def model_file(self, architecture: str) -> Path | None:
        """Return the file of a model class, ``None`` if there is none."""
        for path in sorted((self._root / "sglang/srt/models").glob("*.py")):
            entry = re.search(r"^EntryClass = (\[[^\]]*\]|\w+)", path.read_text(), re.MULTILINE)
            if entry and re.search(rf"\b{architecture}\b", entry[1]):
                return path
        return None

    def verdict(self, architecture: str, names: Iterable[str]) -> dict[str, Any]:
        """Return whether packed experts of an architecture reach its parameters, and why not.

        Args:
            architecture: As config.json has it.
            names: Of all our tensors.
        """
        path = self.model_file(architecture)
        if path is None:
            return {"verdict": "not in this SGLang"}
        place = path.relative_to(self._root).as_posix()
        renames = _renaming_line(path.read_text())
        if renames is not None:
            names = [name.replace("weight_packed", "weight") for name in names]
            place += f":{renames}"
        missing = self._unknown(names if renames else [n for n in names if _EXPERT.match(n)])
        verdict = "takes" if not missing else "has no parameter for packed experts"
        return {"verdict": verdict, "file": place, "example": missing[:1]}

    def _unknown(self, names: Iterable[str]) -> list[str]:
        missing = []
        for name in names:
            projections = _projections(name)
            if projections and self._last(name, projections) not in self.parameters():
                missing.append(name)
        return missing

    def _last(self, name: str, projections: tuple[str, str, str]) -> str:
        return self.wanted(name, projections).rpartition(".")[2]


def _projections(name: str) -> tuple[str, str, str] | None:
    """Return how a family calls gate, down and up; ``None`` if it is no expert's tensor."""
    match = re.search(r"experts\.\d+\.(\w+)\.", name)
    if match is None:
        return None
    return ("w1", "w2", "w3") if match[1].startswith("w") else ("gate_proj", "down_proj", "up_proj")


def _renaming_line(text: str) -> int | None:
    """Return the line that renames packed weights, unless it is for one accelerator only."""
    for match in _RENAMES.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2].strip()
        if before.startswith('if "weight_packed" in name'):
            return text.count("\n", 0, match.start()) + 1
    return None


def fused_name(module: str, stored: frozenset[str]) -> str:
    """Return the name of the module that a projection becomes part of, if the others are there."""
    parent, dot, last = module.rpartition(".")
    for fused, parts in _FUSED.items():
        if last in parts and all(f"{parent}{dot}{part}" in stored for part in parts):
            return f"{parent}{dot}{fused}"
    return module
