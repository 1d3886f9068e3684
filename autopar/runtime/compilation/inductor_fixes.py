"""Faults of inductor, up to torch 2.13, that lead to wrong numbers in silence; mended while a
program is compiled. The private names that this takes are in this file alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._ordered_set import OrderedSet


@contextmanager
def right_code() -> Iterator[None]:
    """A context in which inductor generates code without these faults."""
    caches: Any = torch.compiler.config
    with ExitStack() as stack:
        stack.enter_context(_after_mutations())
        stack.enter_context(_own_local_buffers())
        stack.enter_context(_collectives_of_bools())
        # No code is taken from caches that was kept without these fixes.
        stack.enter_context(caches.patch(cache_key_tag=f"{caches.cache_key_tag} fixes 2"))
        yield


@contextmanager
def _collectives_of_bools() -> Iterator[None]:
    """A context in which a collective of bools stays one.

    Inductor gives the operands of a collective the dtype that a sum of its arguments would have: a
    bool and the number of ranks make a 64-bit integer. A backward that reads the saved result as
    bools then reads other bytes.
    """
    from torch._inductor.lowering import lowerings

    with_promotion = {
        operator: lowering
        for operator, lowering in lowerings.items()
        if getattr(operator, "namespace", "") == "_c10d_functional"
        if hasattr(lowering, "__wrapped__")
    }
    lowerings.update({op: lowering.__wrapped__ for op, lowering in with_promotion.items()})
    try:
        yield
    finally:
        lowerings.update(with_promotion)


@contextmanager
def _after_mutations() -> Iterator[None]:
    """A context in which what reads a tensor that an operator changes in place comes after it.

    Inductor lets an all-reduce change its operand. Where it changes the loops of a node, to fuse
    the node with another one, it forgets that the node reads the changed tensor. The node may then
    be fused with the one that makes the operand, and be computed from the operand. So the loss of a
    vocabulary that is cut was wrong.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    by_torch = SchedulerNode.recompute_size_and_body

    def with_dependencies(node: Any, *args: Any, **kwargs: Any) -> None:
        added = OrderedSet(d for d in node.read_writes.reads if isinstance(d, StarDep | WeakDep))
        by_torch(node, *args, **kwargs)
        found = node.read_writes.with_read(added) if added else node.read_writes
        node.set_read_writes(found.rename(node.mutation_renames))

    with mock.patch.object(SchedulerNode, "recompute_size_and_body", with_dependencies):
        yield


@contextmanager
def _own_local_buffers() -> Iterator[None]:
    """A context in which nodes in one outer loop have no buffer together that is too small.

    Such a buffer has what one iteration of the outer loop computes. Where the outer loop is cut
    into tiles, the iterations of a tile overwrite it (pytorch/pytorch issue 185702).
    """
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
    from torch._inductor.virtualized import V

    by_torch = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    def may_fuse(node: Any, kernels: Any, depth: int) -> bool:
        outer = [loop for kernel in kernels for loop in (kernel.loop_nest.loops or ())[:depth]]
        has_buffers = bool(getattr(V.local_buffer_context, "local_buffers", None))
        if has_buffers and any(loop.steps != 1 for loop in outer):
            return False
        return by_torch(node, kernels, depth)

    with mock.patch.object(
        OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", may_fuse
    ):
        yield
