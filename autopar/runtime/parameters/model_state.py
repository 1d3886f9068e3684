"""All parameters and buffers of a program: what each rank stores between steps, and the tensors
that the graph takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.ir.captured import CapturedModel
from autopar.ir.layout import I, format_layout
from autopar.ir.parameter_collectives import ParameterSpec, unsupported_axis
from autopar.ir.plan_data import ParameterPlan
from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.data_assignment import ProgramParameter, install_data_assignment
from autopar.runtime.dtensors.install import install_handlers
from autopar.runtime.dtensors.sharding import dtensor_of_part, local_part, shard_whole
from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.parameters.initial_values import (
    meta_tensors_of_rank_0,
    parts_from_rank_0,
    warn_of_meta_tensors,
)
from autopar.runtime.parameters.missing_values import MissingValues
from autopar.runtime.parameters.weight import Weight


class ModelState:
    """All tensors of a model, placed on the mesh as ``plans`` says, with the values of rank 0.

    Args:
        share_leaf: whether a parameter may be its own leaf on a single device. autograd then fills
            ``parameter.grad`` itself.
        keep: the names of the tensors that this rank holds; None for all.
        like: a state whose values are copied. None takes the values of rank 0's model; tensors that
            are on the meta device there have no values, and a warning says so.

    Attributes:
        weights: the parameters by their names; tied parameters once.
        buffers: the buffers and constants by their names, whole on each rank.

    Raises:
        RunError: no collective takes a parameter from its stored to its used layout.
    """

    def __init__(
        self,
        captured: CapturedModel,
        plans: Mapping[str, ParameterPlan],
        mesh: Mesh,
        *,
        share_leaf: bool = False,
        keep: Collection[str] | None = None,
        like: ModelState | None = None,
    ) -> None:
        self._mesh, self._plans, self._share_leaf = mesh, plans, share_leaf
        self._updated = frozenset(captured.updates)
        self.weights: dict[str, Weight] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        given = {n: t for n, t in captured.state.items() if n not in captured.aliases}
        install_handlers(mesh)
        stored = {name: self._plan(name).stored for name in _parameters(captured, given)}
        kept = [name for name in given if keep is None or name in keep]
        missing: list[str] = []
        if like is None:
            missing = meta_tensors_of_rank_0(given, mesh)
            warn_of_meta_tensors(missing, stored)
            values = parts_from_rank_0(given, stored, mesh, set(kept), missing)
        else:
            values = like.local_copies()
        dtypes = _dtypes_in_graph(captured)
        for name in kept:
            if name in stored:
                self.weights[name] = self._weight(
                    name, given[name], values[name], dtypes.get(name, values[name].dtype)
                )
            else:
                self.buffers[name] = values[name]
        self._buffer_parts = {
            name: self._part(name, buffer) for name, buffer in self.buffers.items()
        }
        self._missing_values: MissingValues | None = None
        if missing and mesh.device.type != "meta":
            own = {name: t for name in missing if (t := self.user_tensor(name, {})) is not None}
            self._missing_values = MissingValues(own, self.buffers)

    def check_has_values(self) -> None:
        """Raises :class:`RunError`, on every rank, while tensors have no values. All ranks must
        call it.
        """
        if self._missing_values is not None:
            run_on_all_ranks("the first step", self._missing_values.check)
            self._missing_values = None

    def fill_missing(self) -> None:
        """Gives the tensors without values small random numbers, or zeros where they hold no
        floating-point numbers: stand-ins, on which a program takes the time that it takes.
        """
        if self._missing_values is not None:
            self._missing_values.fill()

    def local_copies(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's parts of all tensors that it holds."""
        parts = {name: w.parameter.detach() for name, w in self.weights.items()} | self.buffers
        return {
            name: (t.to_local() if isinstance(t, DTensor) else t).clone()
            for name, t in parts.items()
        }

    def graph_argument(self, name: str) -> torch.Tensor:
        """The tensor that the graph takes for the parameter, buffer or constant ``name``: this
        rank's part in the used layout.
        """
        weight = self.weights.get(name)
        return self._buffer_parts[name] if weight is None else weight.leaf

    @property
    def updated(self) -> list[torch.Tensor]:
        """The :meth:`graph_argument` of each buffer that the program updates."""
        return [part for name, part in self._buffer_parts.items() if name in self._updated]

    def lasting(self, names: Sequence[str]) -> dict[int, bool]:
        """The places of the ``names`` whose :meth:`graph_argument` has its memory in all steps, and
        whether each is a parameter.
        """
        return {
            place: name in self.weights
            for place, name in enumerate(names)
            if (name not in self.weights or not self.weights[name].spec.is_copied)
            and name not in self._updated
        }

    def user_tensor(self, name: str, aliases: Mapping[str, str]) -> torch.Tensor | None:
        """The tensor that the user sees under ``name``; None where another rank holds it."""
        name = aliases.get(name, name)
        return self.weights[name].parameter if name in self.weights else self.buffers.get(name)

    def _plan(self, name: str) -> ParameterPlan:
        whole = (I,) * len(self._mesh.sizes)
        return self._plans.get(name) or ParameterPlan(whole, whole)

    def _weight(
        self, name: str, given: torch.Tensor, local: torch.Tensor, dtype: torch.dtype
    ) -> Weight:
        plan, mesh = self._plan(name), self._mesh
        _check_supported(name, plan, mesh)
        spec = ParameterSpec(
            name, tuple(given.shape), plan.stored, plan.used, mesh.sizes, local.dtype, dtype
        )
        placed = local if mesh.size == 1 else dtensor_of_part(local, plan.stored, mesh)
        parameter = nn.Parameter(placed, requires_grad=given.requires_grad)
        if isinstance(parameter, DTensor):
            described = ProgramParameter(name, mesh, lambda w: shard_whole(w, plan.stored, mesh))
            install_data_assignment(parameter, described)
        inside = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter.data
        if self._share_leaf and mesh.size == 1 and not spec.is_cast:
            return Weight(spec, parameter, inside, parameter)
        leaf = inside.new_empty(0, dtype=dtype) if spec.is_copied else inside.detach()
        return Weight(spec, parameter, inside, leaf.requires_grad_(given.requires_grad))

    def _part(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        plan = self._plans.get(name)
        return local_part(buffer, plan.used, self._mesh) if plan else buffer


def _parameters(captured: CapturedModel, given: Mapping[str, torch.Tensor]) -> list[str]:
    """The names among ``given`` of parameters. A parameter that the graph does not use has no
    placeholder.
    """
    kinds = {i.target: i.kind for i in captured.inputs}
    return [
        name
        for name, tensor in given.items()
        if kinds.get(name) == "parameter"
        or (name not in kinds and isinstance(tensor, nn.Parameter))
    ]


def _dtypes_in_graph(captured: CapturedModel) -> dict[str, torch.dtype]:
    """By parameter, the dtype that the graph computes in."""
    placeholders = captured.graph.find_nodes(op="placeholder")
    return {
        i.target: node.meta["val"].dtype
        for i, node in zip(captured.inputs, placeholders, strict=True)
        if i.kind == "parameter"
    }


def _check_supported(name: str, plan: ParameterPlan, mesh: Mesh) -> None:
    axis = unsupported_axis(plan.stored, plan.used, mesh.sizes)
    if axis is not None:
        raise RunError(
            f"parameter {name}: stored as {format_layout(plan.stored)} it cannot be used as "
            f"{format_layout(plan.used)} (axis {mesh.names[axis]!r})"
        )


def with_meta_state(captured: CapturedModel) -> CapturedModel:
    """``captured`` with meta tensors for its state, so that it holds no memory of the model."""
    light = copy.copy(captured)
    light.state = {}
    for name, tensor in captured.state.items():
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        trains = tensor.requires_grad
        light.state[name] = (
            nn.Parameter(empty, trains)
            if isinstance(tensor, nn.Parameter)
            else empty.requires_grad_(trains)
        )
    return light


def check_dtype_and_device(
    parameters: Iterable[torch.Tensor],
    device: torch.device,
    fn: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Raises :class:`RunError` if ``fn`` would give a parameter another dtype or device."""
    for dtype in {p.dtype for p in parameters}:
        probe = torch.empty(1, dtype=dtype, device=device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != dtype:
            raise RunError(
                f"a compiled program stays {dtype} on {probe.device}, asked for {moved.dtype} on "
                f"{moved.device}: convert or move the model before compiling it"
            )
