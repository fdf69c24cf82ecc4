"""Compares a GPU with the CPU before it is given any work.

A driver, a compiler or a memory that errs would otherwise show when somebody verifies the
artifact. It also compiles the most usual kernel.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import numpy as np

from mxconvert.model import BLOCK_SIZE, Action, Item, TensorInfo
from mxconvert.pipeline.devices.launches import Kind, Launch
from mxconvert.pipeline.devices.ring import Work
from mxconvert.pipeline.pieces import Part
from mxconvert.pipeline.slots import Slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxconvert.pipeline.devices.ring import Outcome, Ring
    from mxconvert.quantize import Quantizer

_COLUMNS = 256
_MOST_ROWS = 256
_SECONDS = 120.0  # Triton compiles meanwhile
_NONFINITE = 0x7F80


class OtherBytesError(RuntimeError):
    """A GPU does not give the bytes that the CPU gives."""


def pattern(rows: int) -> NDArray[np.uint16]:
    """Return BF16 bits ``[rows, 256]``: every exponent, and values near each other."""
    rng = np.random.default_rng(20_26)
    bits = rng.integers(0, 1 << 16, (rows, _COLUMNS), np.uint16)
    bits[(bits & _NONFINITE) == _NONFINITE] = 0
    near = bits[::2]
    near &= 0x83FF  # sign, three bits of exponent, mantissa
    near |= 0x3C00
    return bits


def check_device(ring: Ring, quantizer: Quantizer, piece_size: int) -> None:
    """Quantize a matrix on both.

    Raises:
        OtherBytesError: The bytes differ.
        Exception: The device fails.
    """
    rows = min(_MOST_ROWS, piece_size // (2 * _COLUMNS))
    bits, slot = pattern(rows), Slot(piece_size)
    slot.input[: bits.nbytes] = bits.data.cast("B")
    outcome = _run(ring, _work(slot, rows, quantizer.rule))
    if outcome.error is not None:
        raise outcome.error
    packed, scales = bytearray(bits.size // 2), bytearray(bits.size // BLOCK_SIZE)
    quantizer.quantize(
        memoryview(bits.data).cast("B"), "BF16", memoryview(packed), memoryview(scales)
    )
    wrong = sum(
        int((np.frombuffer(made[: len(wanted)], np.uint8) != np.frombuffer(wanted, np.uint8)).sum())
        for made, wanted in ((slot.output, packed), (slot.scales, scales))
    )
    if wrong or outcome.found[0, 0]:
        raise OtherBytesError(
            f"gives {wrong} of {len(packed) + len(scales)} bytes otherwise than the CPU "
            f"(rule {quantizer.rule})"
        )


def _work(slot: Slot, rows: int, rule: str) -> Work:
    size = 2 * rows * _COLUMNS
    source = TensorInfo("check", "BF16", (rows, _COLUMNS), "", 0, size)
    part = Part(Item(Action.QUANTIZE, source, 0, None, None), 0, size, 0, 0, 0, last=True)
    launch = Launch(Kind.QUANTIZE, (part,), rule, 0, 0, 0, measure=False)
    return Work(slot, (launch,), np.empty(0, np.float32), size, lambda _: None)


def _run(ring: Ring, work: Work) -> Outcome:
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    work = Work(work.slot, work.launches, work.factors, 0, done.put)
    if not ring.offer(work):
        raise RuntimeError("takes no work")
    try:
        return done.get(timeout=_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"does not answer for {_SECONDS:.0f} s") from None
