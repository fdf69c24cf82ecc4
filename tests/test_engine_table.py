"""The verdict of `scripts/check_engines.py`: it fails if anything is wrong, or nothing was seen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.table import exit_status, faults

GOOD: dict[str, Any] = {
    "recipe": "qwen-moe",
    "vllm": {"wrong": [], "equal": {}, "class": "C"},
    "sglang": {"verdict": "has no parameter for packed experts", "not_ignored": []},
}
ABSENT = {"stage": "source", "error": "Transformers does not recognize this architecture"}


def results(*families: dict[str, Any], missing: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"families": {str(n): each for n, each in enumerate(families)}, "missing": missing}


def test_all_is_as_claimed() -> None:
    """Also where one family is not in this vLLM, or vLLM was not run."""
    for families in ((GOOD,), (GOOD, GOOD | {"vllm": ABSENT}), (GOOD | {"vllm": None},)):
        assert exit_status(results(*families)) == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"vllm": {"wrong": ["x: not our bytes"]}}, "loads it otherwise"),
        ({"vllm": {"error": "no", "stage": "ours"}}, "refuses it"),
        ({"vllm": {"error": "a bug", "stage": "source"}}, "does not load the source"),
        ({"vllm": ABSENT}, "no source at all"),
        ({"recipe": "gpt-oss"}, "loads it, against"),
        ({"served": {"equal": False}}, "other tokens"),
        ({"sglang": {"verdict": "takes"}}, "SGLang takes it"),
        ({"sglang": {"verdict": "x", "not_ignored": ["lm_head"]}}, "would quantize lm_head"),
    ],
)
def test_every_kind_of_fault_fails(change: dict[str, Any], what: str) -> None:
    (found, *_) = faults(results(GOOD | change))
    assert what in found
    assert exit_status(results(GOOD | change)) == 1


def test_a_family_that_cannot_be_written_fails() -> None:
    assert faults(results(GOOD, missing=("new_moe",))) == ["new_moe: not in this transformers"]
