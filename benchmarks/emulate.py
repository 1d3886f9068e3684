"""The ranks of a mesh in one process: a call cut as a strategy says, run part by part, put
together, and compared with the call itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from autopar.ir.layout import Layout, P, dual
from autopar.ir.nodes import operands
from autopar.ir.plan_data import NodePlan
from autopar.passes.canonical.normal_form import write_normal_form
from autopar.passes.lowering.choose_kernels import choose_kernels
from autopar.passes.lowering.localise import localise
from autopar.rules import rule_of, whole_rule
from autopar.rules.registry import operator_name
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.strategies import Strategy

LOCAL_KERNELS = {None, "mean"}  # the others communicate, or draw numbers
SUMMANDS = torch.Generator().manual_seed(0)  # of the random parts that pending sums are cut in


@dataclass(frozen=True)
class Row:
    """A call; ``fixed`` are the operands that get no gradient although they are floating-point."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fixed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return operator_name(self.target)

    def __str__(self) -> str:
        shapes = [list(t.shape) for t in tensors_in((self.args, self.kwargs))]
        text = "".join(str(shape).replace(" ", "") for shape in shapes)
        return f"{self.name.removeprefix('aten.')}{text}"


def _tolerance(dtype: torch.dtype) -> float:
    """What rounding explains, of gradients that come as random summands, too."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return 1e-10 if (eps := torch.finfo(dtype).eps) < 1e-12 else 50 * eps


def cut(x: torch.Tensor, layout: Layout, sizes: Sequence[int]) -> list[torch.Tensor]:
    """A tensor's parts on all ranks of a mesh, in the order of ranks."""
    if not layout:
        return [x]
    t, size = layout[0], sizes[0]
    if t.is_shard:
        chunks = x.chunk(t.chunks(size), t.dim)
        pieces = [
            torch.cat([chunks[k] for k in t.pieces_of(rank, size)], t.dim) for rank in range(size)
        ]
    elif t is P:
        pieces = _summands(x, size)
    else:
        pieces = [x] * size
    return [part for piece in pieces for part in cut(piece, layout[1:], sizes[1:])]


def _summands(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    if x.dtype == torch.bool:  # a sum of booleans is their "or"
        owner = torch.randint(count, x.shape, generator=SUMMANDS)
        return [x & (owner == k) for k in range(count)]
    if not (x.is_floating_point() or x.is_complex()):
        first = [
            torch.randint(-5, 5, x.shape, generator=SUMMANDS).to(x.dtype) for _ in range(count - 1)
        ]
    else:
        first = [
            torch.randn(x.shape, generator=SUMMANDS, dtype=torch.float64).to(x.dtype)
            for _ in range(count - 1)
        ]
    return [*first, x - sum(first)]


def join(
    parts: Sequence[torch.Tensor], layout: Layout, sizes: Sequence[int], tolerance: float = 1e-10
) -> torch.Tensor:
    """The inverse; AssertionError where ranks that should hold the same do not."""
    if not layout:
        return parts[0]
    t, size = layout[0], len(parts) // sizes[0]
    pieces = [
        join(parts[k * size : (k + 1) * size], layout[1:], sizes[1:], tolerance)
        for k in range(sizes[0])
    ]
    if t.is_shard:
        chunks: dict[int, torch.Tensor] = {}
        for rank, piece in enumerate(pieces):
            places = t.pieces_of(rank, sizes[0])
            chunks.update(
                zip(
                    places,
                    piece.chunk(len(places), t.dim) if len(places) > 1 else [piece],
                    strict=True,
                )
            )
        return torch.cat([chunks[k] for k in sorted(chunks)], t.dim)
    if t is P:
        return (
            torch.stack(pieces).any(0)
            if pieces[0].dtype == torch.bool
            else torch.stack(pieces).sum(0)
        )
    for piece in pieces[1:]:
        close(piece, pieces[0], "ranks differ", tolerance)
    return pieces[0]


def close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-10) -> None:
    """AssertionError unless both are the same but for rounding, wherever numbers are expected."""
    if expected.is_floating_point() and not bool(
        (finite := expected.isfinite()).all()
    ):  # parts of infinity add up to nothing known
        found, expected = found[finite], expected[finite]
    torch.testing.assert_close(
        found,
        expected,
        rtol=tolerance,
        atol=tolerance,
        check_dtype=False,
        equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Those among arguments or results, in their order."""
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


class Program:
    """One call as a captured graph, its rule, and what it computes."""

    def __init__(self, example: Row) -> None:
        graph = fx.Graph()
        graph.placeholder("mesh").meta["val"] = None
        made: dict[int, fx.Node] = {}

        def node(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                if id(x) not in made:
                    made[id(x)] = graph.placeholder(f"x{len(made)}")
                    made[id(x)].meta["val"] = x
                return made[id(x)]
            return type(x)(map(node, x)) if isinstance(x, (list, tuple)) else x

        args = tuple(node(a) for a in example.args)
        kwargs = {k: node(v) for k, v in example.kwargs.items()}
        self.call = graph.call_function(example.target, args, kwargs)
        self.call.meta["val"] = example.target(*example.args, **example.kwargs)
        graph.output(self.call)
        write_normal_form(graph)
        self.graph, self.rule = graph, rule_of(self.call)
        self.tensors = [n.meta["val"] for n, _ in operands(self.call)]
        self.trains = [
            x.is_floating_point() and k not in example.fixed for k, x in enumerate(self.tensors)
        ]
        self.tolerance = max(
            [1e-10, *(_tolerance(t.dtype) for t in (*self.tensors, *self.outputs))]
        )

    @property
    def outputs(self) -> list[torch.Tensor]:
        return tensors_in(self.call.meta["val"])

    def local(self, strategy: Strategy, sizes: Sequence[int]) -> fx.Node:
        """The call as the passes make it for one rank."""
        copy = fx.Graph()
        copy.output(copy.graph_copy(self.graph, {}))
        call = next(c for c in copy.nodes if c.op == "call_function")
        plan = NodePlan(strategy.ins, strategy.out, strategy.factors, strategy.kernels)
        call.meta.update(layout=strategy.out, plan=plan, plan_name="it")
        choose_kernels(copy)
        localise(copy, {"it": self.rule}, sizes)
        return call

    def check(self, strategy: Strategy, sizes: Sequence[int]) -> None:
        """AssertionError where the parts do not make up the values and gradients of the whole."""
        call = self.local(strategy, sizes)
        ranks = math.prod(sizes)
        pieces = [
            cut(x, layout, sizes) for x, layout in zip(self.tensors, strategy.ins, strict=True)
        ]
        leaves = [
            [p.clone().requires_grad_(grad) for p in parts]
            for parts, grad in zip(pieces, self.trains, strict=True)
        ]
        outputs = [run_call(call, [parts[rank] for parts in leaves]) for rank in range(ranks)]
        for parts, whole in zip(zip(*outputs, strict=True), self.outputs, strict=True):
            found = join([o.detach() for o in parts], strategy.out, sizes, self.tolerance)
            close(found, whole, "value", self.tolerance)
        if any(o.requires_grad for o in outputs[0]):
            self._check_gradients(strategy, sizes, leaves, outputs)

    def _check_gradients(
        self,
        strategy: Strategy,
        sizes: Sequence[int],
        leaves: list[list[torch.Tensor]],
        outputs: list[list[torch.Tensor]],
    ) -> None:
        wholes = [
            x.clone().requires_grad_(grad)
            for x, grad in zip(self.tensors, self.trains, strict=True)
        ]
        results = run_call(self.call, wholes)
        carrying = [j for j, x in enumerate(results) if x.requires_grad]
        weights = {
            j: torch.randn(results[j].shape, generator=SUMMANDS, dtype=torch.float64).to(
                results[j].dtype
            )
            for j in carrying
        }
        torch.autograd.backward([results[j] for j in carrying], list(weights.values()))
        shares = {j: cut(weight, dual(strategy.out), sizes) for j, weight in weights.items()}
        for rank, mine in enumerate(outputs):
            torch.autograd.backward(
                [mine[j] for j in carrying], [shares[j][rank] for j in carrying]
            )
        for k, (parts, whole) in enumerate(zip(leaves, wholes, strict=True)):
            if whole.grad is not None:
                found = join([p.grad for p in parts], dual(strategy.ins[k]), sizes, self.tolerance)  # type: ignore[misc]
                close(found, whole.grad, f"gradient of operand {k}", self.tolerance)


def run_call(call: fx.Node, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    remaining = iter(
        values
        # operands come in the order in which map_arg meets them, one by one where a node stands
        # twice
    )
    args, kwargs = map_arg((call.args, call.kwargs), lambda _: next(remaining))
    return tensors_in(call.target(*args, **kwargs))  # type: ignore[operator]


def every(
    program: Program, sizes: Sequence[int], parts: dict[str, int] | None = None
) -> list[Strategy]:
    """All strategies of a call; ``parts`` as in :func:`strategies`."""
    output = any(program.trains) and any(
        o.is_floating_point() or o.is_complex() for o in program.outputs
    )
    rule = program.rule or whole_rule(len(program.trains), complete_gradient=False)
    return node_strategies(rule, program.trains, output, sizes, lambda *_: True, parts=parts)


def local(found: Sequence[Strategy]) -> list[Strategy]:
    """Those that can be run here."""
    return [s for s in found if set(s.kernels) <= LOCAL_KERNELS]
