"""Recomputation: what the backward reads and the forward did not keep is computed again, at first
need, and once.

Ranks recompute alike, collectives included: autograd runs the nodes of a graph in one order, that
of their making in reverse, and all ranks of a mesh make the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.pipeline.recomputed_call import (
    CallEnvironment,
    Operand,
    ProgramInput,
    RecomputedCall,
    RecomputedStorage,
    SavedHandle,
    SavedTensor,
    StorageView,
    map_nested,
    storage_key,
    tensors_in,
    unpack,
)


class RecomputeContext:
    """One program's recomputed calls; ``forward`` is the one that runs, if any."""

    def __init__(self) -> None:
        self.forward: _Forward | None = None
        self.numbers = count()


class RecomputedOperator:
    """An operator, as the target of a graph's node, whose results and whatever else it saves are
    not kept.

    ``changing`` are the places among its tensors of those that do not stay as they are until the
    backward: buffers.
    """

    def __init__(
        self, operator: Callable[..., Any], changing: Collection[int], context: RecomputeContext
    ) -> None:
        self.operator, self.changing, self.context = operator, frozenset(changing), context
        self.__name__ = self.__qualname__ = (
            f"recomputed_{getattr(operator, '__name__', 'call').partition('.')[0]}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.context.forward
        if forward is None:
            return self.operator(*args, **kwargs)
        return forward.call(self.operator, self.changing, args, kwargs)


def operator_of(target: Any) -> Any:
    """What a node computes, recomputed or not."""
    return target.operator if isinstance(target, RecomputedOperator) else target


def run(program: fx.GraphModule, mesh: Mesh, arguments: Sequence[torch.Tensor]) -> Any:
    """Calls ``program(mesh, *arguments)``, which may have recomputed calls."""
    if "recomputation" not in program.meta:
        targets = (node.target for node in program.graph.nodes)
        program.meta["recomputation"] = next(
            (t.context for t in targets if isinstance(t, RecomputedOperator)), None
        )
    context: RecomputeContext | None = program.meta["recomputation"]
    if context is None or not torch.is_grad_enabled():
        return program(mesh, *arguments)
    context.forward = forward = _Forward(mesh.random_streams, arguments, context.numbers)
    try:
        with saved_tensors_hooks(forward.pack, unpack):
            return program(mesh, *arguments)
    finally:
        context.forward = None
        forward.end()


class _Forward:
    """The forward of one microbatch, and which storages in it are not to be kept."""

    def __init__(
        self, random_streams: RandomStreams, arguments: Iterable[Any], numbers: Iterator[int]
    ) -> None:
        self._moment, self._numbers = CallEnvironment(random_streams), numbers
        # The weak reference keeps the address of a storage from being used again while this looks
        # at it.
        self._boxes: dict[int, tuple[ProgramInput | RecomputedStorage, StorageWeakRef]] = {}
        for t in arguments:
            if isinstance(t, torch.Tensor) and t.is_leaf:
                self._note(t, ProgramInput(t))

    def end(self) -> None:
        """Lets go of the boxes: autograd holds on to ``pack``."""
        self._boxes.clear()

    def _note(self, t: torch.Tensor, box: ProgramInput | RecomputedStorage) -> None:
        storage = t.untyped_storage()
        self._boxes[storage._cdata] = box, StorageWeakRef(storage)

    def pack(self, t: torch.Tensor) -> SavedHandle:
        known = self._boxes.get(storage_key(t))
        return SavedTensor(t) if known is None else StorageView(known[0], t)

    def call(
        self,
        operator: Callable[..., Any],
        changing: Collection[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = RecomputedCall(next(self._numbers), operator, self._moment)
        tensors: list[torch.Tensor] = []

        def note(t: torch.Tensor) -> Operand:
            tensors.append(t)
            return Operand(
                SavedTensor(t.clone()) if len(tensors) - 1 in changing else self.pack(t),
                t.requires_grad,
            )

        call.args, call.kwargs = (
            map_nested(args, torch.Tensor, note),
            {k: map_nested(v, torch.Tensor, note) for k, v in kwargs.items()},
        )
        own = set(map(storage_key, tensors))
        saved: list[tuple[int, StorageView, StorageWeakRef]] = []

        def pack(t: torch.Tensor) -> SavedHandle:
            if (key := storage_key(t)) in own:
                return self.pack(t)
            view = StorageView(None, t)
            saved.append((key, view, StorageWeakRef(t.untyped_storage())))
            return view

        with saved_tensors_hooks(pack, unpack):
            out = operator(*args, **kwargs)
        made: dict[int, RecomputedStorage] = {}
        for i, t in enumerate(tensors_in(out)):
            if (key := storage_key(t)) not in own and key not in made:
                made[key] = box = RecomputedStorage(call)
                call.results.append((i, ref(box)))
                self._note(t, box)
        for i, (key, view, _) in enumerate(saved):
            if key in made:
                view.box = made[key]
            else:
                view.box = box = RecomputedStorage(call)
                call.internals.append((i, ref(box)))
        saved.clear()  # autograd holds on to pack
        return out
