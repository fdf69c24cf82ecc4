"""From a piece that was read to work for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mxconvert.pipeline.devices.launches import plan_launches
from mxconvert.pipeline.devices.ring import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from mxconvert.pipeline.convert import Converter
    from mxconvert.pipeline.devices.launches import Launch
    from mxconvert.pipeline.devices.pool import Devices
    from mxconvert.pipeline.devices.ring import Outcome
    from mxconvert.pipeline.pieces import Part, Piece
    from mxconvert.pipeline.slots import Slot


class Handover:
    """Gives pieces to devices.

    Args:
        devices: The devices.
        converter: Knows scales.
        measure: Whether errors are measured.
    """

    def __init__(self, devices: Devices, converter: Converter, *, measure: bool) -> None:
        self._devices = devices
        self._converter = converter
        self._measure = measure

    def offer(
        self,
        piece: Piece,
        slot: Slot,
        back: Callable[[tuple[Launch, ...], Outcome], None],
    ) -> bool:
        """Give a device the piece; ``False`` if the host has to make it.

        Args:
            piece: It was read.
            slot: Where it lies.
            back: Called with what came of it, if it was given away.

        Raises:
            SourceError: Scales cannot be read.
        """
        blocks_each = self._devices.programs_blocks
        if not blocks_each:
            return False
        known: dict[Part, np.ndarray] = {}
        launches = plan_launches(
            piece,
            self._converter.rule,
            measure=self._measure,
            blocks_each=blocks_each,
            has_factors=lambda part: self._look_up(part, known),
        )
        if not launches:
            return False
        wanted = [known[part] for launch in launches if launch.scaled for part in launch.parts]
        factors = np.concatenate(wanted) if wanted else np.empty(0, np.float32)
        return self._devices.offer(
            Work(slot, launches, factors, piece.source_bytes, lambda made: back(launches, made))
        )

    def _look_up(self, part: Part, known: dict[Part, np.ndarray]) -> bool:
        factors = self._converter.factors(part)
        if factors is not None:
            known[part] = factors
        return factors is not None
