"""A part of many items, such that several runs cover all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mxconvert.errors import UsageError

WHOLE_SOURCE_LIMIT = 8 * 2**30
"""Bytes of source tensors up to which all of them are read by default."""

_SAMPLE = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class Sample:
    """Part ``number`` of ``parts`` equal parts; the parts together are everything."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Read ``N/T``.

        Raises:
            UsageError: Not of that form, or N not in 1 to T.
        """
        match = _SAMPLE.fullmatch(text)
        if match is None or int(match[1]) > int(match[2]):
            raise UsageError(
                f"--sample {text!r}: expected N/T with N from 1 to T",
                hint="use --sample 1/10, tomorrow 2/10, and so on",
                code="bad-sample",
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def choose(cls, text: str | None, size: int) -> Sample:
        """Return the sample asked for; without one, a part of about `WHOLE_SOURCE_LIMIT`.

        Raises:
            UsageError: Not of the form ``N/T``, or N not in 1 to T.
        """
        if text is not None:
            return cls.parse(text)
        return cls(1, max(1, -(-size // WHOLE_SOURCE_LIMIT)))

    def takes(self, position: int) -> bool:
        """Whether the item at ``position`` (from 0) belongs to the part."""
        return position % self.parts == self.number - 1

    def within(self, begin: int, count: int) -> range:
        """Return which of ``count`` items belong to the part, counted from the first.

        ``begin`` is the position of the first item.
        """
        return range((self.number - 1 - begin) % self.parts, count, self.parts)
