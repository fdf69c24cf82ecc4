"""Does config.json declare exactly what is stored."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from mxconvert.manifest import PLAIN_FORMAT
from mxconvert.patterns import REGEX_PREFIX, names_asked_for, renamed
from mxconvert.recipes.families import FAMILIES
from mxconvert.verify.report import Check, Collector
from mxconvert.writer.documents.config import is_sane_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mxconvert.manifest import FormatSpec

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_PLACES = ("quantization_config", "text_config.quantization_config")  # as vLLM looks for it
_DTYPE_KEYS = ("dtype", "torch_dtype")
_LINEAR = "Linear"
_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}
_MXFP8: dict[str, Any] = {**_WEIGHTS, "num_bits": 8, "dynamic": True}


class Declaration:
    """What the quantization_config says about modules, and whether each entry is used."""

    def __init__(self, ignore: list[str], targets: list[str]) -> None:
        self._exact = {entry for entry in ignore if not entry.startswith(REGEX_PREFIX)}
        self._regexes = _compile(ignore)
        self._linear = _LINEAR in targets
        self._targets = {entry for entry in targets if not entry.startswith(REGEX_PREFIX)}
        self._target_regexes = list(_compile(targets).values())
        self._unused_exact = set(self._exact)
        self._unused_regexes = dict(self._regexes)

    def ignores(self, module: str) -> bool:
        """Whether loaders leave ``module`` unquantized."""
        return module in self._exact or any(regex.match(module) for regex in self._regexes.values())

    def targets(self, module: str) -> bool:
        """Whether loaders expect ``module`` to be packed unless it is ignored."""
        return (
            self._linear
            or module in self._targets
            or any(regex.match(module) for regex in self._target_regexes)
        )

    def see(self, module: str) -> None:
        """Take note of a stored module, to find entries that name none."""
        called = chain.from_iterable(recipe.called(module) for recipe in FAMILIES)
        for name in (*names_asked_for(module), *renamed(module), *called):
            self._unused_exact.discard(name)
            used = [entry for entry, regex in self._unused_regexes.items() if regex.match(name)]
            for entry in used:
                del self._unused_regexes[entry]

    def stale(self) -> list[str]:
        """Return the ignore entries that matched no stored module."""
        return sorted({*self._unused_exact, *self._unused_regexes})


def _compile(entries: list[str]) -> dict[str, re.Pattern[str]]:
    regexes = (entry for entry in entries if entry.startswith(REGEX_PREFIX))
    return {entry: re.compile(entry.removeprefix(REGEX_PREFIX)) for entry in regexes}


def check_config(
    config: Mapping[str, Any],
    collector: Collector,
    *,
    path: str,
    format_spec: FormatSpec | None,
    activations: object = None,
) -> Declaration | None:
    """Check the declaration itself; modules are compared by the caller.

    Args:
        config: The parsed config.json.
        collector: Receives findings.
        path: What messages call the file.
        format_spec: What the manifest says; ``None`` for another tool's artifact.
        activations: The manifest's option of that name.

    Returns:
        The declaration, ``None`` if there is none that can be read, or should be none.
    """
    copies = dict(_copies(config, ""))
    if format_spec == PLAIN_FORMAT:
        _check_plain(copies, collector, path)
        _check_dtypes(config, "", collector, path)
        return None
    _check_dtypes(config, "", collector, path)
    place = next((name for name in _PLACES if name in copies), None)
    for other in copies.keys() - {place}:
        message = f"{path}: {other} is a second, stale copy of the quantization settings"
        collector.fail(Check.CONFIG, "stale-quantization-config", message, path=path)
    if place is None:
        message = f"{path}: has no quantization_config at its top level or in text_config"
        collector.fail(Check.CONFIG, "no-quantization-config", message, path=path)
        return None
    settings = copies[place]
    try:
        return _read(settings, collector, path, format_spec, activations)
    except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
        message = f"{path}: {place} cannot be read as compressed-tensors does: {error!r}"
        collector.fail(Check.CONFIG, "bad-quantization-config", message, path=path)
        return None


def _check_plain(copies: Iterable[str], collector: Collector, path: str) -> None:
    """Refuse settings of a quantization where nothing is quantized."""
    for place in copies:
        message = f"{path}: {place} declares a quantization, but the weights are plain"
        collector.fail(Check.CONFIG, "stale-quantization-config", message, path=path)


def _copies(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in QUANTIZATION_KEYS:
                yield f"{place}{key}", inner
            else:
                yield from _copies(inner, f"{place}{key}.")


def _check_dtypes(config: Mapping[str, Any], place: str, collector: Collector, path: str) -> None:
    for key in _DTYPE_KEYS:
        if key in config and not is_sane_dtype(config[key]):
            message = f"{path}: {place}{key} is {config[key]!r}, expected a dtype to compute in"
            collector.fail(Check.CONFIG, "config-dtype", message, path=path)
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config") and key not in QUANTIZATION_KEYS:
            _check_dtypes(value, f"{place}{key}.", collector, path)


def _read(
    settings: Any,
    collector: Collector,
    path: str,
    format_spec: FormatSpec | None,
    activations: object,
) -> Declaration:
    groups = list(settings["config_groups"].values())
    expected_format = "mxfp4-pack-quantized" if format_spec is None else format_spec.name
    expected_method = "compressed-tensors" if format_spec is None else format_spec.quant_method
    facts: list[tuple[str, object, object]] = [
        ("format", expected_format, settings["format"]),
        ("quant_method", expected_method, settings["quant_method"]),
        ("number of config_groups", 1, len(groups)),
    ]
    group = groups[0]
    facts += [(f"weights.{key}", value, group["weights"][key]) for key, value in _WEIGHTS.items()]
    if format_spec is not None:
        facts += _activation_facts(group["input_activations"], activations)
    for name, expected, found in facts:
        if expected != found or type(expected) is not type(found):
            collector.fail(
                Check.CONFIG,
                "quantization-config",
                f"{path}: quantization_config: {name}",
                path=path,
                expected=repr(expected),
                found=repr(found),
            )
    return Declaration(list(settings["ignore"]), list(group["targets"]))


def _activation_facts(found: Any, option: object) -> list[tuple[str, object, object]]:
    if option == "mxfp8":
        return [(f"input_activations.{key}", value, found[key]) for key, value in _MXFP8.items()]
    return [("input_activations", None, found)]
