"""An expert's matrices as its family uses them, read from what is stored.

Each function is what the forward pass of transformers' own code says, written down in numpy,
and reads nothing of mxconvert: a gate or up matrix ``[inner, hidden]`` and a down matrix
``[hidden, inner]`` such that the output is ``down @ (act(gate @ x) * (up @ x))``.
`tests/interop/test_family_code.py` runs that code to confirm them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.families.configs import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Stored = Callable[[str], Array]
    Reading = Callable[[Stored, str, int], dict[str, Array]]

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
UP_DOWN = ("up_proj", "down_proj")


def own(*projections: str) -> Reading:
    """``nn.Linear`` for each: ``[out, in]`` as stored."""

    def read(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
        return {name: stored(f"{experts}.{expert}.{name}.weight") for name in projections}

    return read


def halves(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
    """``linear(x, gate_up[e]).chunk(2)``, ``linear(h, down[e])``: gate above up, ``[out, in]``."""
    gate_up, down = stored(f"{experts}.gate_up_proj")[expert], stored(f"{experts}.down_proj")
    inner = gate_up.shape[0] // 2
    return {"gate_proj": gate_up[:inner], "up_proj": gate_up[inner:], "down_proj": down[expert]}


def columns(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
    """``(x @ gate_up[e]).chunk(2)``, ``h @ down[e]``: gate left of up, ``[in, out]``."""
    gate_up, down = stored(f"{experts}.gate_up_proj")[expert], stored(f"{experts}.down_proj")
    inner = gate_up.shape[1] // 2
    return {
        "gate_proj": gate_up[:, :inner].T,
        "up_proj": gate_up[:, inner:].T,
        "down_proj": down[expert].T,
    }


def alternating(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
    """``x @ gate_up[e]``, of which even columns are the gate's and odd ones up's."""
    gate_up, down = stored(f"{experts}.gate_up_proj")[expert], stored(f"{experts}.down_proj")
    return {
        "gate_proj": gate_up[:, 0::2].T,
        "up_proj": gate_up[:, 1::2].T,
        "down_proj": down[expert].T,
    }


def alternating_biases(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
    """The biases of `alternating`."""
    gate_up = stored(f"{experts}.gate_up_proj_bias")[expert]
    down = stored(f"{experts}.down_proj_bias")[expert]
    return {"gate_proj": gate_up[0::2], "up_proj": gate_up[1::2], "down_proj": down}


def granite(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
    """``linear(x, input_linear[e]).chunk(2)``, ``linear(h, output_linear[e])``."""
    block = experts.removesuffix(".experts")
    both = stored(f"{block}.input_linear.weight")[expert]
    inner = both.shape[0] // 2
    down = stored(f"{block}.output_linear.weight")[expert]
    return {"gate_proj": both[:inner], "up_proj": both[inner:], "down_proj": down}


def dbrx(stored: Stored, experts: str, expert: int) -> dict[str, Array]:
    """``view(E, inner, hidden)[e]`` of each; ``x @ w1.T``, ``x @ v1.T``, ``h @ w2``."""
    w1, v1, w2 = (
        stored(f"{experts}.mlp.{name}").reshape(EXPERTS, -1, stored(f"{experts}.mlp.w1").shape[-1])
        for name in ("w1", "v1", "w2")
    )
    return {"w1": w1[expert], "v1": v1[expert], "w2": w2[expert].T}
