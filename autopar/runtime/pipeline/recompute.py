"""Recomputation and offloading: activations that the backward reads and that the device did not
save are computed again, or come back from the host, at first need, and once.

Ranks recompute alike, collectives included: autograd runs the nodes of a graph in the reverse order
of their making, and all ranks of a mesh make the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, pairwise
from typing import Any
from weakref import ref

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.communication.host_link import HostLink
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.pipeline.host_storage import HostStorage
from autopar.runtime.pipeline.recomputed_call import (
    CallEnvironment,
    Operand,
    ProgramInput,
    RecomputedCall,
    RecomputedStorage,
    SavedHandle,
    SavedTensor,
    StorageSource,
    StorageView,
    map_nested,
    storage_key,
    tensors_in,
    unpack,
)


class RecomputeContext:
    """The state that the recomputed and offloaded calls of one program share.

    Attributes:
        forward: the forward that runs, if one does.
        numbers: numbers the recomputed calls in the order in which they run.
    """

    def __init__(self) -> None:
        self.forward: _Forward | None = None
        self.numbers = count()
        self._links: dict[torch.device, HostLink] = {}

    def link(self, device: torch.device) -> HostLink:
        """The link between a device and the host."""
        if device not in self._links:
            self._links[device] = HostLink(device)
        return self._links[device]


class MarkedOperator:
    """An operator, as the target of a graph's node, whose results the device does not save."""

    def __init__(self, operator: Callable[..., Any], context: RecomputeContext, mark: str) -> None:
        self.operator, self.context = operator, context
        name = getattr(operator, "__name__", "call").partition(".")[0]
        self.__name__ = self.__qualname__ = f"{mark}_{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.context.forward
        if forward is None:
            return self.operator(*args, **kwargs)
        return self._call_in(forward, args, kwargs)

    def _call_in(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class RecomputedOperator(MarkedOperator):
    """An operator that saves nothing for the backward: neither its results nor other tensors.

    ``changing``: the positions among its tensors of buffers, whose values may change before the
    backward.
    """

    def __init__(
        self, operator: Callable[..., Any], changing: Collection[int], context: RecomputeContext
    ) -> None:
        super().__init__(operator, context, "recomputed")
        self.changing = frozenset(changing)

    def _call_in(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward.call(self.operator, self.changing, args, kwargs)


class OffloadedOperator(MarkedOperator):
    """An operator whose results the host keeps until the backward."""

    def __init__(self, operator: Callable[..., Any], context: RecomputeContext) -> None:
        super().__init__(operator, context, "offloaded")

    def _call_in(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward.call_offloaded(self.operator, args, kwargs)


def operator_of(target: Any) -> Any:
    """The operator that a node computes, recomputed, offloaded or neither."""
    return target.operator if isinstance(target, MarkedOperator) else target


def run(program: fx.GraphModule, mesh: Mesh, arguments: Sequence[torch.Tensor]) -> Any:
    """Calls ``program(mesh, *arguments)``, which may have recomputed and offloaded calls."""
    if "recomputation" not in program.meta:
        targets = (node.target for node in program.graph.nodes)
        program.meta["recomputation"] = next(
            (t.context for t in targets if isinstance(t, MarkedOperator)), None
        )
    context: RecomputeContext | None = program.meta["recomputation"]
    if context is None or not torch.is_grad_enabled():
        return program(mesh, *arguments)
    context.forward = forward = _Forward(mesh.random_streams, arguments, context)
    mesh.arrivals.on_arrival = forward.add_input
    try:
        with saved_tensors_hooks(forward.pack, unpack):
            return program(mesh, *arguments)
    finally:
        context.forward = mesh.arrivals.on_arrival = None
        forward.end()


class _Forward:
    """The forward of one microbatch. It knows the storages in it that are not saved on the device,
    because they are recomputed, or on the host, or inputs.
    """

    def __init__(
        self, random_streams: RandomStreams, arguments: Iterable[Any], context: RecomputeContext
    ) -> None:
        self._environment, self._context = CallEnvironment(random_streams), context
        self._last_offloaded: HostStorage | None = None
        self._offloaded: list[ref[HostStorage]] = []
        # The weak reference prevents that another storage gets the same address.
        self._sources: dict[int, tuple[StorageSource, StorageWeakRef]] = {}
        for t in arguments:
            if isinstance(t, torch.Tensor) and t.is_leaf:
                self.add_input(t)

    def add_input(self, t: torch.Tensor) -> None:
        """An input, or a parameter whose values have arrived."""
        self._add_source(t, ProgramInput(t))

    def end(self) -> None:
        """Forgets the storages: autograd keeps ``pack`` alive."""
        self._sources.clear()
        if self._last_offloaded is not None:
            self._last_offloaded.free_on_device()
            self._last_offloaded = None
        wanted = [storage for weak in self._offloaded if (storage := weak()) is not None]
        for before, storage in pairwise(wanted):
            storage.follow(before)

    def _add_source(self, t: torch.Tensor, source: StorageSource) -> None:
        self._sources[storage_key(t)] = source, StorageWeakRef(t.untyped_storage())

    def pack(self, t: torch.Tensor) -> SavedHandle:
        """The handle that autograd saves instead of ``t``."""
        known = self._sources.get(storage_key(t))
        return SavedTensor(t) if known is None else StorageView(known[0], t)

    def call(
        self,
        operator: Callable[..., Any],
        changing: Collection[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls ``operator`` and records how to call it again."""
        call = RecomputedCall(next(self._context.numbers), operator, self._environment)
        tensors: list[torch.Tensor] = []

        def record(t: torch.Tensor) -> Operand:
            tensors.append(t)
            handle = SavedTensor(t.clone()) if len(tensors) - 1 in changing else self.pack(t)
            return Operand(handle, t.requires_grad)

        call.args = map_nested(args, torch.Tensor, record)
        call.kwargs = {k: map_nested(v, torch.Tensor, record) for k, v in kwargs.items()}
        operands = set(map(storage_key, tensors))
        out, saved = self._call(operator, args, kwargs, operands)
        results = self._add_results(call, out, operands)
        for i, (view, t) in enumerate(saved):
            view.source = results.get(storage_key(t))
            if view.source is None:
                view.source = internal = RecomputedStorage(call)
                call.internals.append((i, ref(internal)))
        return out

    def call_offloaded(
        self, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls ``operator`` and copies its results to the host."""
        operands = set[int]()
        map_nested((args, *kwargs.values()), torch.Tensor, lambda t: operands.add(storage_key(t)))
        out, saved = self._call(operator, args, kwargs, operands)
        results: dict[int, HostStorage] = {}
        for t in tensors_in(out):
            if (key := storage_key(t)) not in operands and key not in results:
                results[key] = storage = self._offload(t)
                self._add_source(t, storage)
        for view, t in saved:
            view.source = results.get(storage_key(t)) or ProgramInput(t)
        return out

    def _call(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Collection[int],
    ) -> tuple[Any, list[tuple[StorageView, torch.Tensor]]]:
        """Calls ``operator``. Returns its results, and the tensors that autograd saves besides its
        operands, each with its handle, which has no source yet.
        """
        saved: list[tuple[StorageView, torch.Tensor]] = []

        def pack(t: torch.Tensor) -> SavedHandle:
            if storage_key(t) in operands:
                return self.pack(t)
            view = StorageView(None, t)
            saved.append((view, t.detach()))
            return view

        with saved_tensors_hooks(pack, unpack):
            out = operator(*args, **kwargs)
        found = list(saved)
        saved.clear()  # autograd keeps ``pack`` alive
        return out, found

    def _offload(self, t: torch.Tensor) -> HostStorage:
        """Begins to copy the storage of ``t`` to the host, and frees the one before it."""
        storage, before = HostStorage(t, self._context.link(t.device)), self._last_offloaded
        self._last_offloaded = storage
        self._offloaded.append(ref(storage))
        if before is not None:
            before.free_on_device()
        return storage

    def _add_results(
        self, call: RecomputedCall, out: Any, operands: Collection[int]
    ) -> dict[int, RecomputedStorage]:
        """The storages of the results ``out`` of a call, which are no operands', by their keys."""
        made: dict[int, RecomputedStorage] = {}
        for i, t in enumerate(tensors_in(out)):
            if (key := storage_key(t)) not in operands and key not in made:
                made[key] = storage = RecomputedStorage(call)
                call.results.append((i, ref(storage)))
                self._add_source(t, storage)
        return made
