"""JSON as transformers writes it: two spaces, UTF-8, one newline at the end."""

from __future__ import annotations

import json
from typing import Any


def encode_json(document: Any) -> bytes:
    """Return a document as JSON text, its keys in their order.

    Text that is not valid Unicode (a lone surrogate that the source escaped) is escaped.
    """
    try:
        return _dump(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return _dump(document, ensure_ascii=True).encode()


def _dump(document: Any, *, ensure_ascii: bool) -> str:
    return json.dumps(document, indent=2, ensure_ascii=ensure_ascii) + "\n"
