r"""The ``ignore`` list of the written config, computed from the plan and checked.

Loaders quantize every Linear module that the list does not name, so it must match each
stored rank-2 ``.weight`` that is not packed, and no packed one. Layer and expert
numbers are generalised as far as that stays true, since engines rename prefixes: an
unanchored ``re:.*layers\\.\\d+...`` survives renaming.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mxconvert.patterns import REGEX_PREFIX, config_matcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NUMBER = r"\d+"

Parts = tuple[str, ...]


def ignore_entries(
    kept: Iterable[str], converted: Iterable[str], always: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return a small ignore list.

    Args:
        kept: Module names of stored rank-2 weights that keep their dtype.
        converted: Module names of packed weights.
        always: Module names to list although nothing of them is stored (a tied head).

    Raises:
        AssertionError: The list would not separate the two; a bug.
    """
    kept = sorted(kept)
    converted_shapes = _suffixes(converted)
    entries: set[str] = set(always)
    covered: set[Parts] = set()
    for module in kept:
        candidates = list(_generalise(module))
        if covered.isdisjoint(candidates):
            choice = next((c for c in candidates if c not in converted_shapes), None)
            entries.add(module if choice is None else _regex(choice))
            if choice is not None:
                covered.add(choice)
    result = tuple(sorted(entries))
    _check(result, kept, converted)
    return result


def _generalise(module: str) -> Iterator[Parts]:
    """Yield module suffixes from the most to the least general."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers or numbers[0] == 0:
        return
    suffix = parts[numbers[0] - 1 :]
    kept_numbers = 1 if len(numbers) > 1 else 0
    for keep in range(kept_numbers + 1):
        seen = 0
        result = []
        for part in suffix:
            if part.isdigit():
                seen += 1
                result.append(part if seen <= keep else _NUMBER)
            else:
                result.append(part)
        yield tuple(result)


def _suffixes(modules: Iterable[str]) -> set[Parts]:
    """Return every generalised form of ``modules``, cut at every component."""
    forms = {form for module in modules for form in _generalise(module)}
    return {form[start:] for form in forms for start in range(len(form))}


def _regex(parts: Parts) -> str:
    body = r"\.".join(part if part == _NUMBER else re.escape(part) for part in parts)
    return f"{REGEX_PREFIX}.*{body}$"


def _check(entries: tuple[str, ...], kept: Iterable[str], converted: Iterable[str]) -> None:
    matches = config_matcher(entries)
    for module in _representatives(kept):
        assert matches(module), f"the ignore list misses {module}"  # noqa: S101
    for module in _representatives(converted):
        assert not matches(module), f"the ignore list names {module}"  # noqa: S101


def _representatives(modules: Iterable[str]) -> Iterable[str]:
    """Return one module per kind and layer: regexes cannot tell the others apart."""
    kinds: dict[Parts | str, str] = {}
    for module in modules:
        forms = list(_generalise(module))
        kinds.setdefault(forms[-1] if forms else module, module)
    return kinds.values()
