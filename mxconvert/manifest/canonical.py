"""Canonical JSON: one byte string per document, so that a digest of it is an identity.

Keys sorted by code point, no white space, UTF-8 without escapes beyond those JSON
requires, no floats, one newline at the end.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

INTEGER_LIMIT = 2**53 - 1
"""Largest integer that every JSON reader keeps exactly."""


def encode_canonical(document: Any) -> bytes:
    """Return the canonical form.

    Raises:
        ValueError: A float, or text that is not valid Unicode.
        TypeError: A value JSON does not have.
    """
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode() + b"\n"


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text}; only integers are allowed")


_DECODER = json.JSONDecoder(parse_float=_refuse_number, parse_constant=_refuse_number)


def decode_strict(data: bytes | str) -> Any:
    """Parse JSON that holds no floats.

    Raises:
        ValueError: Not UTF-8, not JSON, nested too deeply, or a number that is no integer.
    """
    try:
        return _DECODER.decode(data if isinstance(data, str) else data.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
