"""The private names of torch's compiler, in this file alone: inductor's entry for a graph, which
takes the graph through AOTAutograd, and the settings of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import result_tensors
from autopar.runtime.compilation.early_products import early_products
from autopar.runtime.compilation.inductor_fixes import right_code
from autopar.runtime.compilation.overlap import products_beside_collectives

Compiled = Callable[..., Sequence[torch.Tensor]]


def compile_graph(
    graph: fx.GraphModule,
    examples: Sequence[torch.Tensor],
    on_part: Callable[[fx.Graph], None],
    communicates: bool,
) -> Compiled:
    """Compiles the forward of ``graph`` and, where ``examples`` ask for gradients, its backward.

    Args:
        graph: takes tensors and returns a tuple of tensors. The compiler changes it.
        examples: tensors like those of each call: in shapes, strides, dtypes and gradients.
        on_part: is called with the graph of ATen operators of the forward, and of the backward,
            before each is compiled.
        communicates: whether there may be collectives in the graph.
    """
    # Here and not above: planning must not import the compiler, which takes a second.
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_part(part: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        on_part(part.graph)
        _donate_nothing()
        return _with_different_results(compile_fx_inner(part, *args, **kwargs))

    settings: dict[str, Any] = {
        # This cache's key is a graph's code, which does not show what autopar's kernels do. The
        # cache of inductor's own, whose key has all ATen operators, stays on.
        "enable_autograd_cache": False,
        # Saved tensors that are used as memory for results would forbid retain_graph=True.
        "donated_buffer": False,
        # The backward is compiled together with the forward, where all ranks are.
        "force_non_lazy_backward_lowering": True,
    }
    order = products_beside_collectives() if communicates else nullcontext()
    with config.patch(settings), right_code(), early_products(), order:
        compiled: Any = compile_fx(graph, examples, inner_compile=compile_part)
        return compiled  # type: ignore[no-any-return]


def _donate_nothing() -> None:
    """Tells the backward that no saved tensor may be overwritten. Without ``donated_buffer`` torch
    leaves that open, and takes it for the opposite in a backward with ``retain_graph=True``.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _with_different_results(compiled: Any) -> Any:
    """A part that has no result twice.

    The compiler makes one tensor of two results that are computed alike, such as the results of two
    conversions that differ in their gradients alone. Autograd would give the gradients of both to
    one of them.
    """

    def call(inputs: list[Any]) -> list[Any]:
        results, seen = list(compiled(inputs)), set[int]()
        for place, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                results[place] = result.detach() if id(result) in seen else result
                seen.add(id(result))
        return results

    call._boxed_call = True  # type: ignore[attr-defined]  # it may empty the list of inputs
    return call


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
