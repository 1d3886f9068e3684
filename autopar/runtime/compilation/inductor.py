"""The private names of torch's compiler, in this file alone: inductor's entry for a graph, which
takes the graph through AOTAutograd, and the settings of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._ordered_set import OrderedSet

from autopar.ir.nodes import result_tensors

Compiled = Callable[..., Sequence[torch.Tensor]]


def compile_graph(
    graph: fx.GraphModule, examples: Sequence[torch.Tensor], on_part: Callable[[fx.Graph], None]
) -> Compiled:
    """Compiles the forward of ``graph`` and, where ``examples`` ask for gradients, its backward.

    Args:
        graph: takes tensors and returns a tuple of tensors. The compiler changes it.
        examples: tensors like those of each call: in shapes, strides, dtypes and gradients.
        on_part: is called with the graph of ATen operators of the forward, and of the backward,
            before each is compiled.
    """
    # Here and not above: planning must not import the compiler, which takes a second.
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_part(part: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        on_part(part.graph)
        return compile_fx_inner(part, *args, **kwargs)

    settings: dict[str, Any] = {
        # This cache's key is a graph's code, which does not show what autopar's kernels do. The
        # cache of inductor's own, whose key has all ATen operators, stays on.
        "enable_autograd_cache": False,
        # Saved tensors that are used as memory for results would forbid retain_graph=True.
        "donated_buffer": False,
        # The backward is compiled together with the forward, where all ranks are.
        "force_non_lazy_backward_lowering": True,
    }
    with config.patch(settings), _after_collectives():
        compiled: Any = compile_fx(graph, examples, inner_compile=compile_part)
        return compiled  # type: ignore[no-any-return]


@contextmanager
def _after_collectives() -> Iterator[None]:
    """A context in which what reads the result of a collective is computed after the collective.

    Inductor lets an all-reduce change its operand in place. Where its code generator for CPUs
    changes the loops of a node, to fuse the node with another one, torch up to 2.13 forgets that
    the node reads what the all-reduce changes. The node is then fused with the one that makes the
    operand, and computed from the operand. The loss of a vocabulary that is cut was wrong so.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    by_torch = SchedulerNode.recompute_size_and_body

    def with_dependencies(node: Any, *args: Any, **kwargs: Any) -> None:
        added = OrderedSet(d for d in node.read_writes.reads if isinstance(d, StarDep | WeakDep))
        by_torch(node, *args, **kwargs)
        found = node.read_writes.with_read(added) if added else node.read_writes
        node.set_read_writes(found.rename(node.mutation_renames))

    node_class: Any = SchedulerNode
    caches: Any = torch.compiler.config
    node_class.recompute_size_and_body = with_dependencies
    try:
        # No code is taken from caches that was kept without this context.
        with caches.patch(cache_key_tag=f"{caches.cache_key_tag} after collectives"):
            yield
    finally:
        node_class.recompute_size_and_body = by_torch


def random_operators(graph: fx.Graph) -> list[str]:
    """The operators in a graph of ATen operators that would draw random numbers of the compiler's
    own.
    """
    return [
        node.name
        for node in graph.nodes
        if "inductor_random" in str(node.target)
        or (
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            and "dot_product" not in str(node.target)  # attention with dropout is not among them
        )
    ]


def collectives(graph: fx.Graph) -> list[str]:
    """The collectives of a graph of ATen operators, in their order, with dtypes. They are the same
    on all ranks of a mesh. Sizes need not be: a rank at the end of an axis may send less.
    """
    return [
        " ".join([str(node.target), *(str(t.dtype) for t in result_tensors(node))])
        for node in graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional"
        if node.target is not torch.ops._c10d_functional.wait_tensor.default
    ]
