"""Sample inputs of torch's own table of operators, each as a model that calls the operator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from emulate import tensors_in
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.ir.nodes import arguments

TOLERANCE = 1e-9
SPLIT, UNSPLIT, REFUSED, NOT_EXPORTABLE, WRONG, CRASH = (
    "split",
    "unsplit",
    "refused",
    "not exportable",
    "wrong",
    "crash",
)


class Applies(nn.Module):
    """One call of an operator as a model with a loss."""

    def __init__(self, operator: Any, arguments: tuple[Any, ...], trains: bool = True) -> None:
        """Where ``trains`` is False the operands have no gradient."""
        super().__init__()
        leaves, self.spec = tree_flatten(arguments)
        self.operator, self.leaves = (
            operator,
            [None if isinstance(a, torch.Tensor) else a for a in leaves],
        )
        self.places = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
        floating = [
            i for i in self.places if leaves[i].is_floating_point() or leaves[i].is_complex()
        ]
        floating = floating if trains else []
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.weights = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.ones_like(leaves[i], requires_grad=False))
                for i in floating
            }
        )

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = list(self.leaves)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x * self.weights[str(i)] if str(i) in self.weights else x
        args, kwargs = tree_unflatten(leaves, self.spec)
        total = (
            self.scale * 1e-3
        )  # so that there is a gradient, whatever the operator does with its operands
        for result in tensors_in(self.operator(*args, **kwargs)):
            parts = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
            total = total + (parts.to(torch.float64) * _fixed(parts)).sum() * self.scale
        return total


def _fixed(like: torch.Tensor) -> torch.Tensor:
    """Numbers between 0.5 and 1.5 that differ from place to place."""
    count = torch.arange(like.numel(), dtype=torch.float64)
    return (torch.remainder(count * 0.6180339887, 1.0) + 0.5).reshape(like.shape)


@dataclass(frozen=True)
class Case:
    """One sample input of an operator."""

    name: str
    number: int
    operator: Any
    arguments: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach() for t in tensors_in(self.arguments))

    def model(self) -> Applies:
        """It, its operands without a gradient where torch has none for them."""
        model = Applies(self.operator, self.arguments)
        try:
            eager_step(model, self.tensors)
        except (RuntimeError, NotImplementedError):
            return Applies(self.operator, self.arguments, trains=False)
        return model


def cases(only: list[str], samples: int) -> Iterator[tuple[str, list[Case]]]:
    """The operators of torch's table that take float64, on a CPU too, each with its dense sample
    inputs.
    """
    for entry in op_db:
        name = f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name
        if (
            torch.float64 not in entry.dtypes
            or entry.name.startswith("jiterator")
            or (only and not {entry.name, name} & set(only))
        ):
            continue
        torch.manual_seed(0)
        random.seed(0)  # some samples are made with Python's
        try:
            # Not entry.sample_inputs: it looks up the stack's source files for each operator, which
            # takes longer than the check.
            inputs = list(entry.sample_inputs_func(entry, "cpu", torch.float64, False))
        except Exception:
            inputs = []
        found = [(s.input, *s.args) for s in inputs]
        plain = [
            Case(name, k, entry.op, (args, s.kwargs))
            for k, (args, s) in enumerate(zip(found, inputs, strict=True))
        ]
        plain = [
            c for c in plain if c.tensors and all(t.layout is torch.strided for t in c.tensors)
        ]
        picked = plain if len(plain) <= samples else random.Random(name).sample(plain, samples)
        yield name, sorted(picked, key=lambda c: c.number)


def eager_step(
    model: nn.Module, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The loss and the gradients, of copies: an operator may write to what it is given."""
    torch.manual_seed(1)
    tensors = tuple(t.clone() for t in tensors)
    model.zero_grad()
    loss = model(*tensors)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss.detach(), {
        n: g.to_dense() if g is not None and g.is_sparse else g for n, g in grads.items()
    }


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "empty" in str(
        node.target
    )


def draws_numbers(graph: fx.Graph) -> bool:
    return any(
        is_random(n) and arguments(n).get("dropout_p") != 0
        for n in graph.nodes
        if n.op == "call_function"
    )


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:160]
