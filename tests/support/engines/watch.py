"""Notes which checkpoint tensors a loader reads, and where it copies them. Needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SENTINEL_BYTE = 0xFF
"""Fills integer parameters before loading; as a scale it is NaN, which is never written."""

_VIEWS = frozenset(
    {
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "diagonal",
        "expand",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
    }
)


def fill_with_sentinels(model: torch.nn.Module) -> None:
    """Overwrite every parameter with NaN, or integers with `SENTINEL_BYTE` throughout."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.data.fill_(float("nan"))
        else:
            parameter.data.view(torch.uint8).fill_(SENTINEL_BYTE)


def untouched(parameter: torch.Tensor) -> int:
    """Return how many elements still hold their sentinel."""
    if parameter.is_floating_point() and parameter.element_size() > 1:
        return int(parameter.isnan().sum())
    return int((parameter.view(torch.uint8) == SENTINEL_BYTE).sum())


class Watch(TorchDispatchMode):
    """While active, notes reads of the tensors that passed through `tag`.

    Attributes:
        offered: Names of the tensors that passed, in order.
        read: Names of those that any operation but a view read.
        copies: Address of a destination's storage -> names that were copied into it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[str] = []
        self.read: set[str] = set()
        self.copies: dict[int, list[str]] = {}
        self._names: dict[int, str] = {}
        self._held: list[torch.Tensor] = []

    def tag(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
        """Yield the same tensors, each in a storage of its own."""
        for name, stored in weights:
            own = stored.clone()
            self._names[_address(own)] = name
            self._held.append(own)
            self.offered.append(name)
            yield name, own

    def adopted(self, model: torch.nn.Module) -> None:
        """Count tensors that became parameters themselves as read and copied."""
        for parameter in model.parameters():
            name = self._names.get(_address(parameter))
            if name is not None:
                self.read.add(name)
                self.copies.setdefault(_address(parameter), []).append(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        operation = func.overloadpacket.__name__
        if operation not in _VIEWS:
            for name in self._sources(args[1:] if operation == "copy_" else args):
                self.read.add(name)
                if operation == "copy_":
                    self.copies.setdefault(_address(args[0]), []).append(name)
        result = func(*args, **(kwargs or {}))
        self._follow(operation, args, result)
        return result

    def _sources(self, args: Iterable[Any]) -> list[str]:
        names = []
        for arg in args:
            parts = arg if isinstance(arg, list | tuple) else [arg]
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            names += [self._names[key] for key in map(_address, tensors) if key in self._names]
        return names

    def _follow(self, operation: str, args: tuple[Any, ...], result: Any) -> None:
        """Give a changed copy of one tensor (transposed, cast) that tensor's name."""
        sources = set(self._sources(args))
        if operation in _VIEWS or operation == "copy_" or len(sources) != 1:
            return
        if not isinstance(result, torch.Tensor) or _address(result) in self._names:
            return
        self._names[_address(result)] = sources.pop()
        self._held.append(result)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
