"""A program's parameters and buffers: what each rank stores between steps, and the leaf tensors
that the graph takes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import RunError
from autopar.ir.layout import I, Layout, S, can_convert, format_layout, local_shape
from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import (
    convert_for_dtensor,
    layout_of_placements,
    placements,
)
from autopar.runtime.parameters.data_assignment import ProgramParameter, install_data_assignment
from autopar.runtime.parameters.missing_values import MissingValues, marked_as_missing
from autopar.runtime.parameters.random_fill import install_random_fill

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.ir.plan_data import ParameterPlan
    from autopar.runtime.parameters.gradient_clipping import NormGroup


@dataclass(eq=False)
class Weight:
    """One parameter: the user's tensor, this rank's part of it, and the leaf whose gradient the
    graph computes.
    """

    name: str
    stored: Layout
    used: Layout
    parameter: nn.Parameter  # a DTensor, or a plain tensor on one device
    local: torch.Tensor  # shares the parameter's memory
    leaf: (
        torch.Tensor
    )  # shares it too, unless it is a copy; has the dtype that the graph computes in
    gathered: tuple[
        int, ...
    ]  # the mesh axes along which the leaf is put together from the stored parts
    exchanged: tuple[int, ...]  # those along which ranks exchange pieces of them
    leaf_bytes: int
    version: int = 0  # of the parameter, when last seen
    pipelined: NormGroup | None = None
    summed: torch.Tensor | None = (
        # the gradient of the microbatches so far, in the parameter's dtype, where that is not the
        # leaf's
        None
    )

    @property
    def cast(self) -> bool:
        """Whether the graph computes in another dtype than the parameter has."""
        return self.leaf.dtype != self.local.dtype

    @property
    def copied(self) -> bool:
        """Whether the leaf has memory of its own, for the length of a step."""
        return self.moved or self.cast

    @property
    def moved(self) -> bool:
        """Whether other ranks have some of what is in the leaf."""
        return bool(self.gathered or self.exchanged)

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the backward has left so far."""
        return self.leaf.grad if self.summed is None else self.summed

    @torch.no_grad()
    def add_up(self) -> None:
        """Moves the leaf's gradient to what is summed in the parameter's dtype."""
        gradient, self.leaf.grad = self.leaf.grad, None
        if gradient is not None:
            gradient = gradient.to(self.local.dtype)
            self.summed = gradient if self.summed is None else self.summed.add_(gradient)

    def drop_gradient(self) -> None:
        """Forgets what the backward has left."""
        self.leaf.grad = self.summed = None

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """``local``, shaped as this rank's part, as what ``parameter.grad`` shall be."""
        if isinstance(self.parameter, DTensor):
            # The constructor and not from_local: 2.5 us against 22 us, for every parameter in every
            # step.
            local = DTensor(local, self.parameter._spec, requires_grad=False)  # type: ignore[call-arg]
        if self.pipelined is not None:
            local.pipelined = self.pipelined  # type: ignore[attr-defined]
        return local

    def refresh(self) -> None:
        """Follows what happened to the parameter: a write, another storage, freezing."""
        parameter = self.parameter
        if self.leaf is parameter:
            return
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        if local.data_ptr() != self.local.data_ptr():
            self.local = local
            if not self.copied:
                self.leaf.data = local
        if self.version != parameter._version:
            # A DTensor counts the writes to it, its local tensor does not. Counted, autograd
            # refuses the backward of a graph that saved the old value.
            self.version = parameter._version
            torch.autograd.graph.increment_version(self.leaf)
        if self.leaf.requires_grad != parameter.requires_grad:
            self.leaf.requires_grad_(parameter.requires_grad)


class ModelState:
    """All tensors of a model, placed on the mesh as ``plans`` says, with the values of rank 0.

    ``weights`` has the parameters by their names (tied ones once), ``buffers`` the buffers and
    constants, whole on each rank. Arguments: ``share_leaf``, whether on a single device the
    parameter may be its own leaf (then autograd fills ``.grad``). Tensors that are meta on rank 0
    come out without values, with a warning; ``keep``, the names of those that this rank holds
    (free: all). Raises :class:`RunError` for a parameter plan that cannot run. ``like`` has the
    values, instead of rank 0's model; nothing is then sent.
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
        self._mesh, self._plans = mesh, plans
        names = [name for name in captured.state if name not in captured.aliases]
        kinds = {i.target: i.kind for i in captured.inputs}
        placeholders = zip(
            captured.inputs, captured.graph.find_nodes(op="placeholder"), strict=True
        )
        self._computes_in: dict[str, torch.dtype] = {
            i.target: n.meta["val"].dtype for i, n in placeholders if i.kind == "parameter"
        }
        # A parameter that the graph does not use has no placeholder.
        parameters = {
            n
            for n in names
            if kinds.get(n) == "parameter"
            or (n not in kinds and isinstance(captured.state[n], nn.Parameter))
        }
        self.weights: dict[str, Weight] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        kept = names if keep is None else [name for name in names if name in keep]
        given, stored = (
            {name: captured.state[name] for name in names},
            {n: self._stored(n) for n in parameters},
        )
        if like is None:
            missing = _meta_on_rank_0(given, mesh)
            _warn_of_meta(missing, stored)
            values = _from_rank_0(given, stored, mesh, set(kept), missing)
        else:
            missing, values = [], like.local_copies()
        for name in kept:
            if name in parameters:
                self.weights[name] = self._weight(
                    name, captured.state[name], values[name], share_leaf
                )
            else:
                self.buffers[name] = values[name]
        self._slices = {name: self._slice(name, buffer) for name, buffer in self.buffers.items()}
        own = {
            name: tensor for name in missing if (tensor := self.user_tensor(name, {})) is not None
        }
        self._missing_values = (
            MissingValues(own, self.buffers) if missing and mesh.device.type != "meta" else None
        )

    def check_has_values(self) -> None:
        """Raises :class:`RunError`, on every rank, while there are tensors that nothing gave a
        value. All ranks must call it.
        """
        if self._missing_values is not None:
            run_on_all_ranks("the first step", self._missing_values.check)
            self._missing_values = None

    def local_copies(self) -> dict[str, torch.Tensor]:
        """This rank's parts of all that it holds, in memory of their own."""
        parts = {
            name: weight.parameter.detach() for name, weight in self.weights.items()
        } | self.buffers
        return {
            name: (t.to_local() if isinstance(t, DTensor) else t).clone()
            for name, t in parts.items()
        }

    def graph_argument(self, name: str) -> torch.Tensor:
        """What the graph takes for the parameter, buffer or constant ``name``: this rank's part in
        the layout in which it is used.
        """
        weight = self.weights.get(name)
        return self._slices[name] if weight is None else weight.leaf

    def user_tensor(self, name: str, aliases: Mapping[str, str]) -> torch.Tensor | None:
        """What the user sees under ``name``; None where another rank holds it."""
        name = aliases.get(name, name)
        return self.weights[name].parameter if name in self.weights else self.buffers.get(name)

    def _stored(self, name: str) -> Layout:
        plan = self._plans.get(name)
        return plan.stored if plan else (I,) * len(self._mesh.sizes)

    def _weight(
        self, name: str, given: torch.Tensor, local: torch.Tensor, share_leaf: bool
    ) -> Weight:
        stored, mesh = self._stored(name), self._mesh
        plan = self._plans.get(name)
        used = plan.used if plan else stored
        gathered, exchanged = _moved(name, stored, used, mesh)
        trains = given.requires_grad
        placed = local if mesh.size == 1 else distribute(local, stored, mesh)
        parameter = nn.Parameter(placed, requires_grad=trains)
        if isinstance(parameter, DTensor):
            install_data_assignment(
                parameter,
                ProgramParameter(name, mesh, lambda whole: shard_whole(whole, stored, mesh)),
            )
            install_random_fill(mesh)
        inside = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        dtype = self._computes_in.get(name, inside.dtype)
        if share_leaf and mesh.size == 1 and dtype == inside.dtype:
            leaf: torch.Tensor = parameter
        else:
            copied = gathered or exchanged or dtype != inside.dtype
            leaf = (inside.new_empty(0, dtype=dtype) if copied else inside.detach()).requires_grad_(
                trains
            )
        size = local.numel() * dtype.itemsize * mesh.count(gathered)
        return Weight(name, stored, used, parameter, inside, leaf, gathered, exchanged, size)

    def _slice(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        plan = self._plans.get(name)
        return local_part(buffer, plan.used, self._mesh) if plan else buffer


def with_meta_state(captured: CapturedModel) -> CapturedModel:
    """``captured`` with a state of meta tensors, which holds on to no memory."""
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


def distribute(local: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
    """This rank's part ``local`` of a tensor in ``layout`` (types I, R, S and s) as a DTensor."""
    return DTensor.from_local(local, mesh.device_mesh, placements(layout, mesh), run_check=False)


def as_dtensor(local: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """A tensor that the graph made, in ``layout`` (any types), as a DTensor."""
    local, placed = convert_for_dtensor(local, layout, mesh)
    return DTensor.from_local(local, mesh.device_mesh, placed or [Replicate()], run_check=False)


def local_part(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """This rank's part of ``whole`` in ``layout`` (types I, R, S and s): a view."""
    axes = sorted(range(len(layout)), key=lambda axis: layout[axis].is_inner)
    for t, n, place in ((layout[axis], mesh.sizes[axis], mesh.coordinate[axis]) for axis in axes):
        if t.is_shard:
            size = whole.shape[t.dim] // n
            whole = whole.narrow(t.dim, place * size, size)
    return whole


def _moved(
    name: str, stored: Layout, used: Layout, mesh: Mesh
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a parameter is gathered where it is used, and those along which pieces
    of it are exchanged.
    """
    gathered: list[int] = []
    exchanged: list[int] = []
    for axis, (at_rest, in_use) in enumerate(zip(stored, used, strict=True)):
        if mesh.sizes[axis] == 1 or at_rest == in_use or (at_rest == I and in_use.kind == "R"):
            continue
        later_cut = not can_convert(used, axis, at_rest)
        reordered = at_rest == S(in_use.dim) and in_use.pieces > 1
        if not at_rest.is_shard or not (reordered or in_use.kind in "IR") or later_cut:
            raise RunError(
                f"parameter {name}: stored as {format_layout(stored)} it cannot be used as {format_layout(used)} "
                f"(axis {mesh.names[axis]!r})"
            )
        (exchanged if reordered else gathered).append(axis)
    return tuple(gathered), tuple(exchanged)


def _from_rank_0(
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, Layout],
    mesh: Mesh,
    keep: Collection[str],
    missing: Collection[str],
) -> dict[str, torch.Tensor]:
    """Of each tensor in ``keep`` its part in its stored layout (whole if it has none), on the
    mesh's device, with the value of rank 0; those that are ``missing`` there are on the meta
    device."""
    whole = (I,) * len(mesh.sizes)
    result: dict[str, torch.Tensor] = {}
    for name in filter(keep.__contains__, missing):
        result[name] = marked_as_missing(
            local_shape(state[name].shape, stored.get(name, whole), mesh.sizes),
            state[name].dtype,
            mesh.device,
        )
    for bucket in _by_dtype(
        {name: tensor for name, tensor in state.items() if name not in missing}
    ):
        for name, value in _broadcast({name: state[name] for name in bucket}, mesh).items():
            if name not in keep:
                continue
            result[name] = local_part(value, stored.get(name, whole), mesh).clone(
                memory_format=torch.contiguous_format
            )
    return result


def _meta_on_rank_0(state: Mapping[str, torch.Tensor], mesh: Mesh) -> list[str]:
    flags = torch.tensor(
        [tensor.is_meta for tensor in state.values()], dtype=torch.uint8, device=mesh.device
    )
    if (program_group := mesh.program_group) is not None and len(flags):
        dist.broadcast(flags, group=program_group, group_src=0)
    return [name for name, flag in zip(state, flags.tolist(), strict=True) if flag]


def _warn_of_meta(missing: list[str], stored: Mapping[str, Layout]) -> None:
    if not missing:
        return
    others = [name for name in missing if name not in stored]
    more = (
        "; among them buffers and constants, which a checkpoint may not hold: "
        f"{', '.join(others[:5])}"
        if others
        else ""
    )
    warnings.warn(
        f"the model is on the meta device: {len(missing)} tensors have no values until they are "
        "loaded, for example with "
        f"torch.distributed.checkpoint.load into compiled.state_dict(){more}",
        stacklevel=2,
    )


def _by_dtype(
    state: Mapping[str, torch.Tensor], limit_bytes: int = 25 << 20
) -> Iterable[list[str]]:
    filling: dict[torch.dtype, list[str]] = {}
    filled: dict[torch.dtype, int] = {}
    for name, tensor in state.items():
        filling.setdefault(tensor.dtype, []).append(name)
        filled[tensor.dtype] = filled.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
        if filled[tensor.dtype] > limit_bytes:
            yield filling.pop(tensor.dtype)
            del filled[tensor.dtype]
    yield from filling.values()


def _broadcast(state: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        parts = [
            torch.empty(t.shape, dtype=t.dtype) if t.is_meta else t for t in state.values()
        ]  # meta here, but not on rank 0
        flat = torch.cat([part.detach().to(mesh.device).reshape(-1) for part in parts])
        if (program_group := mesh.program_group) is not None and len(flat):
            # As bytes: gloo does not know every dtype.
            dist.broadcast(flat.view(torch.uint8), group=program_group, group_src=0)
    pieces = flat.split([math.prod(tensor.shape) for tensor in state.values()])
    return {
        name: piece.view(tensor.shape)
        for (name, tensor), piece in zip(state.items(), pieces, strict=True)
    }


def redistributed_like(own: Any, value: Any, mesh: Mesh) -> Any:
    """``value``, if it is a whole tensor and ``own`` a DTensor of its shape, as such a DTensor."""
    if (
        not isinstance(own, DTensor)
        or isinstance(value, DTensor)
        or not isinstance(value, torch.Tensor)
        or value.shape != own.shape
    ):
        return value
    return shard_whole(value, layout_of_placements(own.placements), mesh)


def shard_whole(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
    """``whole``, which all ranks have, in ``layout`` (types I, R, S and s)."""
    return distribute(local_part(whole.to(mesh.device), layout, mesh).contiguous(), layout, mesh)


def check_dtype_and_device(
    parameters: Iterable[torch.Tensor],
    device: torch.device,
    fn: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """RunError if ``fn`` would give a parameter another dtype or device."""
    for dtype in {p.dtype for p in parameters}:
        probe = torch.empty(1, dtype=dtype, device=device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != dtype:
            raise RunError(
                f"a compiled program stays {dtype} on {probe.device}, asked for {moved.dtype} on "
                f"{moved.device}: "
                "convert or move the model before compiling it"
            )
