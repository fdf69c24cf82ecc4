r"""The ``ignore`` list of the written config, computed from the plan and checked.

Loaders quantize every Linear module that the list does not name, so it must match each
stored rank-2 ``.weight`` that is not packed, and no packed one. Layer and expert
numbers are generalised as far as that stays true, since engines rename prefixes: an
unanchored ``re:.*layers\\.\\d+...`` survives renaming. Towers for images and sound are
ignored whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from mxconvert.patterns import REGEX_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_NUMBER = r"\d+"
_TOWER = re.compile(
    r"(?:^|\.)(vision_tower|vision_model|visual|audio_tower|mm_projector|multi_modal_projector"
    r"|resampler_model)\."
)
_TOWER_CALLED = {"vision_model": "vision_(model|tower)", "vision_tower": "vision_(model|tower)"}

Parts = tuple[str, ...]


def ignore_entries(
    kept: Iterable[str], converted: Iterable[str], always: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return a small ignore list.

    Args:
        kept: Names that loaders ask for of stored rank-2 weights that keep their dtype.
        converted: Names that loaders ask for of packed weights.
        always: Module names to list although nothing of them is stored (a tied head).
    """
    by_last: dict[str, list[str]] = defaultdict(list)
    for module in converted:
        by_last[_last(module)].append(module)
    towers, rest = _towers(kept, by_last)
    entries: set[str] = {*always, *(f"{REGEX_PREFIX}.*{name}\\..*" for name in towers)}
    verdicts: dict[Parts, bool] = {}
    for module in sorted(rest):
        candidates = list(_generalise(module))
        if any(verdicts.get(parts, False) for parts in candidates):
            continue
        for parts in candidates:
            if parts not in verdicts:
                verdicts[parts] = _separates(parts, by_last)
            if verdicts[parts]:
                entries.add(_regex(parts))
                break
        else:
            entries.add(module)
    return tuple(sorted(entries))


def _towers(kept: Iterable[str], converted: Mapping[str, list[str]]) -> tuple[set[str], list[str]]:
    """Return towers of which nothing is converted, and the kept modules outside of them.

    Engines rename what is inside of a tower (wqkv to q, k and v), so it is ignored whole.
    """
    inside: dict[str, list[str]] = defaultdict(list)
    rest = []
    for module in kept:
        match = None if "\n" in module else _TOWER.search(module)
        if match is None:
            rest.append(module)
        else:
            inside[_TOWER_CALLED.get(match[1], match[1])].append(module)
    for name in list(inside):
        regex = re.compile(f".*{name}\\.")
        if any(regex.match(module) for modules in converted.values() for module in modules):
            rest.extend(inside.pop(name))
    return set(inside), rest


def _generalise(module: str) -> Iterator[Parts]:
    """Yield module suffixes from the most to the least general."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    if not numbers or numbers[0] == 0 or "\n" in module:
        return
    suffix = parts[numbers[0] - 1 :]
    kept_numbers = 1 if len(numbers) > 1 else 0
    for keep in range(kept_numbers + 1):
        seen = 0
        result = []
        for part in suffix:
            if part.isdecimal():
                seen += 1
                result.append(part if seen <= keep else _NUMBER)
            else:
                result.append(part)
        yield tuple(result)


def _separates(parts: Parts, converted: Mapping[str, list[str]]) -> bool:
    """Whether a candidate's regex matches no converted module.

    Only modules with the same last component need a look: a regex ends with it.
    """
    regex = re.compile(_regex(parts).removeprefix(REGEX_PREFIX))
    return not any(map(regex.match, converted.get(_last(parts[-1]), ())))


def _last(module: str) -> str:
    last = module.rpartition(".")[2]
    return _NUMBER if last.isdecimal() else last


def _regex(parts: Parts) -> str:
    body = r"\.".join(part if part == _NUMBER else re.escape(part) for part in parts)
    return f"{REGEX_PREFIX}.*{body}$"
