"""``--store-option key=value``: checked, typed, and never silently dropped."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mxconvert.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Checksum(StrEnum):
    """Whether CRC64-NVME travels with uploads, so that the store checks it.

    ``AUTO`` goes on without where the store refuses it; ``ALWAYS`` does not.
    """

    AUTO = "auto"
    ALWAYS = "always"
    WHEN_REQUIRED = "when-required"


class Engine(StrEnum):
    """Which library talks to S3."""

    BOTOCORE = "botocore"
    FSSPEC = "fsspec"


S3_OPTIONS = frozenset(
    {
        "acl",
        "addressing",
        "anonymous",
        "ca_bundle",
        "connect_timeout",
        "endpoint",
        "engine",
        "max_object_size",
        "part_count",
        "profile",
        "proxy",
        "read_timeout",
        "region",
        "requester_pays",
        "sse",
        "sse_kms_key_id",
        "storage_class",
    }
)
"""What `s3://` takes; ``docs/reference/push-and-pull.md`` says what each does."""

_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is reached.

    Attributes:
        values: What ``--store-option`` gave, by key.
        checksum: Whether CRC64-NVME travels with uploads.
        connections: How many connections may be open at once.
    """

    values: Mapping[str, str]
    checksum: Checksum = Checksum.AUTO
    connections: int = 16

    def text(self, key: str) -> str | None:
        """Return an option as it was given."""
        return self.values.get(key)

    def flag(self, key: str) -> bool:
        """Return a true-or-false option.

        Raises:
            UsageError: Neither.
        """
        value = self.values.get(key, "false").lower()
        if value not in _TRUE | _FALSE:
            raise UsageError(f"--store-option {key}={value}: expected true or false")
        return value in _TRUE

    def number(self, key: str, default: float) -> float:
        """Return a number above zero.

        Raises:
            UsageError: Not a number, or not above zero, or without end.
        """
        value = self.values.get(key)
        try:
            number = default if value is None else float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            raise UsageError(f"--store-option {key}={value}: expected a number above 0")
        return number

    def count(self, key: str, default: int) -> int:
        """Return a whole number above zero.

        Raises:
            UsageError: Anything else.
        """
        number = self.number(key, default)
        if number != int(number):
            raise UsageError(
                f"--store-option {key}={self.values[key]}: expected a whole number above 0"
            )
        return int(number)

    def refuse_unknown(self, known: Iterable[str], scheme: str) -> None:
        """Refuse a key that the store would ignore.

        Raises:
            UsageError: Naming it, the nearest known one, and all.
        """
        names = sorted(known)
        for key in self.values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise UsageError(
                    f"--store-option {key}: unknown for {scheme}://",
                    hint=f"{hint}known are {', '.join(names) or 'none'}",
                    code="unknown-store-option",
                )


def parse_store_options(pairs: Iterable[str]) -> dict[str, str]:
    """Read ``key=value`` texts.

    Raises:
        UsageError: No ``=``, no key, or a key given twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UsageError(
                "--store-option: expected KEY=VALUE", hint="for example region=eu-central-1"
            )
        if key in values:
            raise UsageError(f"--store-option {key}: given twice")
        values[key] = value
    return values
