"""The options that one operator call may have on a mesh: what the uses of the axes, the mode of
the mesh and the dtypes of the tensors leave of the options of its rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from autopar.ir.layout import I, P, Type
from autopar.ir.nodes import operands, result_tensors
from autopar.rules import Option
from autopar.search.space.meshes import Axis
from autopar.search.space.modes.mode import Mode, Operation


@dataclass(frozen=True)
class MeshMode:
    """The mode of a mesh.

    Attributes:
        mode: None for a mesh without a mode.
        places: the number of each axis of the mode in the mesh, by the axis's name.
        is_required: whether every axis of the mode must split whatever it can.
    """

    mode: Mode | None
    places: Mapping[str, int]
    is_required: bool

    @staticmethod
    def of(axes: Sequence[Axis]) -> MeshMode:
        places = {axis.name: i for i, axis in enumerate(axes) if axis.mode is not None}
        mode = next((axis.mode for axis in axes if axis.mode is not None), None)
        return MeshMode(
            mode, places, mode is not None and all(axes[i].is_required for i in places.values())
        )

    def split(self, options: Sequence[Option]) -> dict[str, Option]:
        """Of one option for each mesh axis, those of the mode's axes, by name."""
        return {name: options[i] for name, i in self.places.items()}

    def types(self, layout: Sequence[Type]) -> dict[str, Type]:
        """The types of a layout along the mode's axes, by name."""
        return {name: layout[i] for name, i in self.places.items()}


class OptionFilter:
    """The options of one operator call."""

    def __init__(self, node: fx.Node, operation: Operation, axes: Sequence[Axis]) -> None:
        self._operation, self._axes, self._mesh_mode = operation, axes, MeshMode.of(axes)
        tensors = (*(operand for operand, _ in operands(node)), node)
        self._are_boolean = [_is_boolean(tensor) for tensor in tensors]

    def is_allowed(self, axis: int, option: Option) -> bool:
        """Whether an axis may have an option."""
        if self._axes[axis].size == 1:
            return option.factor is None and all(t is I for t in (*option.ins, option.out))
        types = (*option.ins, option.out)
        if any(t is P and boolean for t, boolean in zip(types, self._are_boolean, strict=True)):
            return False  # boolean tensors have no sum
        if self._axes[axis].mode is None and option.beside is not None:
            return False  # kernels of two axes belong to modes: they take long to price
        return (
            self._axes[axis].use != "data"
            or option.factor is None
            or option.factor in self._operation.batch
        )

    def splits_samples(self, axis: int, option: Option) -> bool:
        """Whether an axis may have an option, and splits samples if it is there to do that."""
        must_split = (
            self._axes[axis].is_required
            and self._axes[axis].use == "data"
            and self._operation.is_activation
        )
        return self.is_allowed(axis, option) and (
            not must_split or option.factor in self._operation.batch
        )

    def mode_allows(self, options: Sequence[Option]) -> bool:
        """Whether the mode allows these options, one for each axis, together."""
        mode = self._mesh_mode.mode
        return mode is None or mode.allows(self._operation, self._mesh_mode.split(options))

    def mode_prefers(self, options: Sequence[Option]) -> bool:
        """Whether the mode allows these options together and, if it is required, prefers them."""
        mode = self._mesh_mode.mode
        return mode is None or (
            mode.allows(self._operation, split := self._mesh_mode.split(options))
            and (not self._mesh_mode.is_required or mode.prefers(self._operation, split))
        )


def _is_boolean(node: fx.Node) -> bool:
    return any(value.dtype is torch.bool for value in result_tensors(node))
