"""What transformers continues prompts with, always taking the likeliest token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[7, 33, 12, 50, 21, 9], [3, 3, 60, 17, 42], [55]]


def greedy(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the continuations by the folder's weights, computed in float32 without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = []
    for prompt in prompts:
        line = list(prompt)
        for _ in range(tokens):
            with torch.no_grad():
                line.append(int(model(torch.tensor([line])).logits[0, -1].argmax()))
        made.append(line[len(prompt) :])
    return made
