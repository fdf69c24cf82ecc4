"""Typed access to the members of an untrusted JSON object."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mxconvert.errors import VerificationError
from mxconvert.manifest.canonical import INTEGER_LIMIT

if TYPE_CHECKING:
    from mxconvert.manifest.records import Span

Built = TypeVar("Built")
_HEX = re.compile(r"[0-9a-f]+")


def bad(where: str, what: str) -> VerificationError:
    """Return the error for a malformed manifest."""
    return VerificationError(
        f"{where}: {what}",
        hint="fetch the manifest again from where the artifact was published",
        code="bad-manifest",
    )


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether ``value`` is an integer in range (booleans are not)."""
    return type(value) is int and minimum <= value <= INTEGER_LIMIT


def is_hex(value: object, digits: int) -> bool:
    """Whether ``value`` is lowercase hexadecimal of that many digits."""
    return isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value) is not None


class Fields:
    """The members of one JSON object, each to be taken once.

    Every accessor raises `VerificationError`, naming the member, when it is missing or
    of another type; `done` and `end` refuse members that nobody took.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise bad(where, f"a JSON {type(value).__name__}, expected an object")
        self._left: dict[str, Any] = dict(value)
        self.where = where

    def _at(self, key: str) -> str:
        return f"{self.where}: {key}"

    def _take(self, key: str) -> Any:
        if key not in self._left:
            raise bad(self._at(key), "missing")
        return self._left.pop(key)

    def has(self, key: str) -> bool:
        """Whether the member is there and was not taken."""
        return key in self._left

    def sub(self, key: str) -> Self:
        """Take an object."""
        return type(self)(self._take(key), self._at(key))

    def objects(self, key: str, *, label: str) -> list[Self]:
        """Take a list of objects, each called by its member ``label`` in messages."""
        result: list[Self] = []
        for position, value in enumerate(self._list(key)):
            name = value.get(label) if isinstance(value, dict) else None
            place = f"{key}[{position}]" + (f" {name!a}" if isinstance(name, str) else "")
            result.append(type(self)(value, self._at(place)))
        return result

    def _list(self, key: str) -> list[Any]:
        value = self._take(key)
        if not isinstance(value, list):
            raise bad(self._at(key), f"{value!r} is not a list")
        return value

    def text(self, key: str) -> str:
        """Take a string."""
        value = self._take(key)
        if not isinstance(value, str):
            raise bad(self._at(key), f"{value!r} is not a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """Take a string or null."""
        if self._left.get(key, "") is None:
            return self._left.pop(key)  # type: ignore[no-any-return]
        return self.text(key)

    def texts(self, key: str) -> list[str]:
        """Take a list of strings."""
        values = self._list(key)
        for value in values:
            if not isinstance(value, str):
                raise bad(self._at(key), f"{value!r} is not a string")
        return values

    def count(self, key: str, *, minimum: int = 0) -> int:
        """Take an integer of at least ``minimum``."""
        value = self._take(key)
        if not is_count(value, minimum):
            raise bad(self._at(key), f"{value!r} is not an integer of at least {minimum}")
        return int(value)

    def hex(self, key: str, digits: int) -> str:
        """Take a digest of that many hexadecimal digits."""
        value = self._take(key)
        self._check_hex(self._at(key), value, digits)
        return str(value)

    def hexes(self, key: str, digits: int) -> list[str]:
        """Take a list of digests."""
        values = self._list(key)
        for position, value in enumerate(values):
            self._check_hex(f"{self._at(key)}[{position}]", value, digits)
        return values

    @staticmethod
    def _check_hex(where: str, value: Any, digits: int) -> None:
        if not is_hex(value, digits):
            raise bad(where, f"{value!r} is not {digits} lowercase hexadecimal digits")

    def span(self, key: str) -> Span | None:
        """Take an inclusive pair ``[first, last]``, or null."""
        value = self._take(key)
        if value is None:
            return None
        match value:
            case [first, last] if is_count(first) and is_count(last) and first <= last:
                return (first, last)
        raise bad(self._at(key), f"{value!r} is not a pair [first, last] or null")

    def rest(self) -> dict[str, Any]:
        """Take every member that is left."""
        left, self._left = self._left, {}
        return left

    def done(self) -> None:
        """Refuse members that were not taken."""
        if self._left:
            raise bad(self.where, f"unknown keys {sorted(self._left)}")

    def end(self, built: Built) -> Built:
        """Return ``built`` after checking that nothing is left over."""
        self.done()
        return built
