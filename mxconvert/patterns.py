"""Patterns that name modules.

Two grammars meet here. The command line's (`--include`, `--exclude`): an exact module
or tensor name, a shell glob, or ``re:REGEX``. The written config's (`ignore`,
`targets`): an exact module name or ``re:REGEX``, as compressed-tensors reads it
(``match_name`` in its ``utils/match.py``: ``re.match``, anchored at the start only).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from mxconvert.errors import UsageError

REGEX_PREFIX = "re:"
WEIGHT_SUFFIX = ".weight"

Matcher = Callable[[str], bool]


def module_name(tensor_name: str) -> str:
    """Return the module that owns a tensor: the name without ``.weight``."""
    return tensor_name.removesuffix(WEIGHT_SUFFIX)


def compile_pattern(pattern: str, option: str) -> Matcher:
    """Compile a command line pattern to a test on module names.

    Raises:
        UsageError: Empty, or an invalid regular expression.
    """
    if not pattern.removeprefix(REGEX_PREFIX):
        raise UsageError(
            f"{option}: an empty pattern",
            hint="write a name, a glob, or re: and a regular expression",
            code="bad-pattern",
        )
    if pattern.startswith(REGEX_PREFIX):
        try:
            regex = re.compile(pattern.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise UsageError(
                f"{option} '{pattern}': not a valid regular expression: {error}",
                hint="quote the pattern for the shell and escape dots as \\.",
                code="bad-pattern",
            ) from error
        return lambda module: regex.match(module) is not None
    glob = module_name(pattern)
    return lambda module: module == glob or fnmatch.fnmatchcase(module, glob)


# vLLM asks about expert 0 by these names whatever the checkpoint calls its projections
# (get_moe_method in compressed_tensors_moe.py).
_ASKED_AS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def names_asked_for(module: str) -> tuple[str, ...]:
    """Return the names under which loaders look a module up in ``ignore``, its own first."""
    parent, _, last = module.rpartition(".")
    if last in _ASKED_AS and ".experts." in module:
        return module, f"{parent}.{_ASKED_AS[last]}"
    return (module,)


# What transformers 5.24 (conversion_mapping.py) and vLLM 0.32 (prefixes in its model files) call
# modules that some families store under other names; they ask `ignore` about their own.
_LAYER = r"^((?:.*\.)?layers\.\d+)"
_RENAMED: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (
            _LAYER + r"\.attention\.query_key_value$",
            (r"\1.self_attn.q_proj", r"\1.self_attn.k_proj", r"\1.self_attn.v_proj"),
        ),
        (_LAYER + r"\.attention\.dense$", (r"\1.self_attn.o_proj",)),
        (_LAYER + r"\.attention\.f_proj$", (r"\1.self_attn.forget_gate.f_proj",)),
        (_LAYER + r"\.attention\.(\w+)$", (r"\1.self_attn.\2",)),
        (_LAYER + r"\.self_attn\.(f_[ab]_proj)$", (r"\1.self_attn.forget_gate.\2",)),
        (_LAYER + r"\.block_sparse_moe\.gate$", (r"\1.mlp.gate", r"\1.mlp.router")),
        (_LAYER + r"\.block_sparse_moe\.((?:shared_experts\.)?\w+_proj)$", (r"\1.mlp.\2",)),
        (_LAYER + r"\.mamba\.(\w+)$", (r"\1.mixer.\2",)),
        (_LAYER + r"\.conv\.(\w+)$", (r"\1.short_conv.\2",)),
        (
            _LAYER + r"\.(self_attn\.\d+)\.(q_a_proj|kv_a_proj_with_mqa)$",
            (r"\1.\2.fused_qkv_a_proj",),
        ),
    )
)


def renamed(module: str) -> tuple[str, ...]:
    """Return the names that a loader may give to a module that is stored as ``module``."""
    if ".experts." in module:
        return ()
    for pattern, new in _RENAMED:
        match = pattern.match(module)
        if match is not None:
            return tuple(match.expand(name) for name in new)
    return ()
