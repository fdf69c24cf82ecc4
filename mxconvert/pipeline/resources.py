"""What a run works with: kernels, memory, GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxconvert.pipeline.convert import chunk_bytes
from mxconvert.pipeline.devices import Choice, Devices, choose
from mxconvert.pipeline.pieces import kinds_of, largest_granule, largest_held
from mxconvert.pipeline.slots import (
    Budget,
    Needs,
    plan_budget,
    resident_bytes,
    return_free_memory,
    usable_cores,
)
from mxconvert.quantize import Quantizer, load_backend

if TYPE_CHECKING:
    from mxconvert.events import Reporter
    from mxconvert.model import Plan


@dataclass(frozen=True, slots=True)
class Resources:
    """What a run works with.

    Attributes:
        budget: Threads and buffers.
        quantizer: The host's kernels.
        choice: Which GPUs, and why.
        devices: The GPUs, started; ``None`` without.
    """

    budget: Budget
    quantizer: Quantizer
    choice: Choice
    devices: Devices | None

    def close(self) -> None:
        """Let go of the GPUs."""
        if self.devices is not None:
            self.devices.close()


def find_resources(
    plan: Plan,
    *,
    jobs: int | None,
    max_memory: int,
    backend: str,
    device: str,
    report: Reporter,
) -> Resources:
    """Load the kernels, fit buffers into the memory budget, start the GPUs.

    The arguments are those of `RunOptions`. What torch and a GPU's driver map into the process
    is not counted in ``max_memory``; pinned buffers are.

    Raises:
        UsageError: The budget is too small.
        MissingExtraError: The backend or a device cannot be used here.
    """
    return_free_memory()
    resident = resident_bytes()
    converted = plan.quantized.source_bytes + plan.dequantized.source_bytes
    choice = choose(backend, device, converted)
    makers = choice.makers()
    budget = plan_budget(
        jobs or usable_cores(), max_memory, resident, memory_needs(plan), devices=len(makers)
    )
    quantizer = Quantizer(load_backend(choice.backend), plan.options.scale_rule)
    devices = None
    if makers:
        devices = Devices(
            makers,
            quantizer,
            budget.piece_size,
            helped=choice.helped,
            required=choice.required,
            report=report,
        )
        devices.start()
    return Resources(budget, quantizer, choice, devices)


def memory_needs(plan: Plan) -> Needs:
    """Return what the tensors of a plan need of memory."""
    items = kinds_of(plan.files)
    return Needs(
        held=lambda piece_size: largest_held(items, piece_size),
        granule=largest_granule(items),
        chunk=max(map(chunk_bytes, items), default=0),
    )
