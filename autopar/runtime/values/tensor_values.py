"""Code that writes to the tensors of a model on the meta device computes with values: of one tensor
at a time, which is whole while it is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import RunError
from autopar.runtime.values.torch_private import disabled_torch_function, storage_key

# What sets every element of its first operand and reads none.
_OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_"}


class _Parameter(nn.Parameter):
    """On the meta device, and says that it is on the CPU: some of torch's initialisations do
    nothing on the meta device.
    """

    is_meta = property(lambda _: False)  # type: ignore[assignment]
    device = property(lambda _: torch.device("cpu"))  # type: ignore[assignment]


class _Buffer(torch.Tensor):
    """The same for a buffer."""

    __torch_function__ = disabled_torch_function
    is_meta = property(lambda _: False)  # type: ignore[assignment]
    device = property(lambda _: torch.device("cpu"))  # type: ignore[assignment]


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor`` for :class:`TensorValues`."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return _Parameter(empty, tensor.requires_grad)
    return empty.as_subclass(_Buffer)


class TensorValues(TorchDispatchMode):
    """Within, operators on the ``tensors`` (of :func:`without_memory`, by their names) and on views
    of them compute on the CPU.

    Args:
        read: returns the values that a tensor has. It is called where an operator reads a tensor
            that is not the last one that was written to.
        write: takes the values of a tensor, once another is written to.

    Attributes: ``written``, the names of the tensors that were written to.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        read: Callable[[str], torch.Tensor],
        write: Callable[[str, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._names = {storage_key(t): name for name, t in tensors.items()}
        self._tensors = dict(tensors)
        self._read, self._write = read, write
        self._current: tuple[str, torch.Tensor] | None = None
        self.written: set[str] = set()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        if args[0] is None:
            self._leave()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [t for t in pytree.tree_leaves((args, kwargs)) if self._is_known(t)]
        if not found or _is_view(func):
            return func(*args, **kwargs)
        if _makes_alike(func):  # of these only shape and dtype count
            given = pytree.tree_map_only(torch.Tensor, self._like, (args, kwargs))
            return func(*given[0], **given[1])
        mutated = _mutated(func, args, kwargs)
        for tensor in mutated:
            if self._is_known(tensor):
                self._take(tensor, overwritten=_overwrites(func, tensor, self._whole(tensor)))
        given = pytree.tree_map_only(torch.Tensor, self._values, (args, kwargs))
        result = func(*given[0], **given[1])
        return mutated[0] if len(mutated) == 1 else result

    def _is_known(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and storage_key(value) in self._names

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._tensors[self._names[storage_key(tensor)]]

    def _take(self, tensor: torch.Tensor, overwritten: bool) -> None:
        """Makes the tensor the one that is written to."""
        name = self._names[storage_key(tensor)]
        self.written.add(name)
        if self._current is not None and self._current[0] == name:
            return
        self._leave()
        whole = self._tensors[name]
        value = _empty_like(whole)
        if not overwritten:
            value.copy_(self._read(name))
        self._current = name, value

    def _leave(self) -> None:
        if self._current is not None:
            self._write(*self._current)
            self._current = None

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor or a view; another tensor as it is."""
        if not self._is_known(tensor):
            return tensor
        name = self._names[storage_key(tensor)]
        if self._current is not None and self._current[0] == name:
            value = self._current[1]
        else:
            value = _empty_like(self._tensors[name]).copy_(self._read(name))
        return value.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return _empty_like(tensor) if self._is_known(tensor) else tensor


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )


def _makes_alike(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operator writes to."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, (list, tuple)):
                raise RunError(
                    f"{func} writes to several tensors in one call: initialise them one by one"
                )
            if value is not None:
                found.append(value)
    return found


def _overwrites(func: Any, tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name in _OVERWRITES and tensor.numel() == whole.numel()
