"""The order of compiled operators: products beside collectives. The private names of inductor's
scheduler are in this file alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def products_beside_collectives() -> Iterator[None]:
    """A context in which inductor computes beside a collective what does not need its result.

    The gradient of a linear layer's operand goes on to the layer before, and where it is summed
    over ranks, that layer waits. The gradients of weights, which nothing in the backward waits for,
    are computed between the start of the sum and the wait. Where ranks sum the gradients of weights
    in the graph, each sum starts as soon as its gradient can be there, and the wait comes last.
    """
    from torch._inductor import config

    caches: Any = torch.compiler.config
    passes: dict[str, Any] = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [_move_products],
    }
    # No code is taken from caches that was kept in another order.
    key = f"{caches.cache_key_tag} order 2"
    with config.patch(passes), caches.patch(cache_key_tag=key):
        yield


def _move_products(kernels: Sequence[Any]) -> list[Any]:
    """``kernels``, which run in this order, in an order with products beside collectives. The
    collectives keep their order.
    """
    return _into_waits(_behind_starts(_early_starts(_late_waits(kernels))))


def _late_waits(kernels: Sequence[Any]) -> list[Any]:
    """Moves waits behind all else where no kernel reads the result, and the operand of the
    collective need not live until then.
    """
    from torch._inductor.utils import is_wait

    read = set().union(*map(_reads, kernels))
    late = [
        kernel
        for kernel in kernels
        if is_wait(kernel.node)
        and read.isdisjoint(kernel.get_buffer_names())
        and not kernel.node.get_volatile_reads()
    ]
    return [kernel for kernel in kernels if kernel not in late] + late


def _early_starts(kernels: Sequence[Any]) -> list[Any]:
    """Moves the start of each collective, with the products that make its operand and what lies
    between, behind the start before it, as early as their operands are there.
    """
    from torch._inductor.utils import is_collective

    makers = {name: kernel for kernel in kernels for name in kernel.get_buffer_names()}
    readers = defaultdict[Any, set[Any]](set)
    for kernel in kernels:
        for name in _reads(kernel) & makers.keys():
            readers[makers[name]].add(kernel)
    ordered, last = [*kernels], -1  # the place of the start before
    for start in [kernel for kernel in kernels if is_collective(kernel.node)]:
        chain = _needed_alone(start, makers, readers)
        needed = {makers[name] for kernel in chain for name in _reads(kernel) & makers.keys()}
        moved = [kernel for kernel in ordered if kernel in chain]
        rest = [kernel for kernel in ordered if kernel not in chain]
        place = max(last, *(i for i, kernel in enumerate(rest) if kernel in needed), -1) + 1
        ordered = [*rest[:place], *moved, *rest[place:]]
        last = place + len(moved) - 1
    return ordered


def _needed_alone(
    start: Any, makers: Mapping[str, Any], readers: Mapping[Any, set[Any]]
) -> set[Any]:
    """``start``, and the kernels that compute its operand and nothing else, back to products."""
    from torch._inductor.utils import is_collective, is_wait

    chain, left = {start}, [start]
    while left:
        for name in _reads(left.pop()) & makers.keys():
            kernel = makers[name]
            if is_collective(kernel.node) or is_wait(kernel.node) or not readers[kernel] <= chain:
                continue
            chain.add(kernel)
            if not _is_product(kernel):
                left.append(kernel)
    return chain


def _behind_starts(kernels: Sequence[Any]) -> list[Any]:
    """Moves a product behind the start of the next collective, where that does not need it."""
    from torch._inductor.utils import is_collective, is_wait

    ordered, movable = list[Any](), list[Any]()
    for kernel in kernels:
        ordered.append(kernel)
        if is_wait(kernel.node):
            movable = []
        elif _is_product(kernel):
            movable.append(kernel)
        else:
            movable = _not_needed(movable, kernel)
        if is_collective(kernel.node):
            ordered = [k for k in ordered if k not in movable] + movable
            movable = []
    return ordered


def _not_needed(earlier: Sequence[Any], kernel: Any) -> list[Any]:
    """Those kernels of ``earlier`` that need not be there for ``kernel``."""
    needed, found = _reads(kernel), list[Any]()
    for each in reversed(earlier):
        if needed.isdisjoint(each.get_buffer_names()):
            found.append(each)
        else:
            needed |= _reads(each)
    return found[::-1]


def _into_waits(kernels: Sequence[Any]) -> list[Any]:
    """Moves a product before the first wait, behind its operands, whose result it does not need."""
    from torch._inductor.utils import is_wait

    rest, ordered = [*kernels], list[Any]()
    later = {name for kernel in kernels for name in kernel.get_buffer_names()}
    while rest:
        following = [rest.pop(0)]
        if is_wait(following[0].node):
            ready = [k for k in rest if _is_product(k) and not _reads(k) & later]
            rest = [k for k in rest if k not in ready]
            following = ready + following
        ordered += following
        later.difference_update(*(k.get_buffer_names() for k in following))
    return ordered


def _reads(kernel: Any) -> set[str]:
    """The names of the results that a kernel needs to be there. Dependencies that only keep the
    order of collectives are left out.
    """
    return {d.name for d in kernel.unmet_dependencies if not getattr(d, "is_fake", False)}


def _is_product(kernel: Any) -> bool:
    """Whether a kernel is one that inductor does not fuse, such as a product of matrices."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode
    from torch._inductor.utils import is_collective, is_wait

    node = kernel.node
    if is_collective(node) or is_wait(node) or isinstance(node, MultiOutput):
        return False
    return isinstance(kernel, ExternKernelSchedulerNode) or bool(kernel.is_template())
