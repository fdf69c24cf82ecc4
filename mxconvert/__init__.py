"""Convert and distribute the weights of huge Mixture-of-Experts models in MXFP4.

Data flows one way: ``source`` reads headers, ``plan`` decides every output byte's
place, ``quantize`` turns pieces into MXFP4, ``writer`` commits files front to back,
``manifest`` records what was made. ``pipeline`` and ``verify`` compose these stages;
``cli`` is the only part that prints.

`open` reads the verified tensors of an artifact from Python, see ``docs/reference/python.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxconvert.reading import open_artifact as open  # noqa: A004  (that is its name)

__version__ = "0.1.0"
__all__ = ["__version__", "open"]


def __getattr__(name: str) -> Any:
    """Import what reads artifacts when it is asked for: commands start without it."""
    if name == "open":
        from mxconvert.reading import open_artifact  # noqa: PLC0415

        return open_artifact
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
