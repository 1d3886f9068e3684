"""Compiled programs of one GPU as CUDA graphs: the host starts a forward, or a backward, in one
call, however many kernels it has.

This file has the private name of torch for the hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import RunError
from autopar.runtime.compilation.inductor import Compiled


def check_cuda_graphs(
    world_size: int, device_type: str, backend: str = "inductor", draws: bool = False
) -> None:
    """Raises :class:`RunError` for a program that cannot run as CUDA graphs; ``draws``: whether it
    draws random numbers.
    """
    if world_size > 1:
        problem = f"world_size={world_size}: CUDA graphs are for one GPU"
    elif device_type != "cuda":
        problem = f"the model is on {device_type}: move it to a GPU"
    elif backend != "inductor":
        problem = f'the plan has backend="{backend}": plan with backend="inductor"'
    elif draws:
        problem = (
            "the model has dropout, whose seeds come from the host in each call: set its rate to 0"
        )
    else:
        return
    raise RunError(f"cuda_graphs=True: {problem}, or compile without cuda_graphs")


class CudaGraphs:
    """A compiled program that is recorded at its first call and replayed in later ones.

    A replay reads and writes the memory of the recording. So inputs are copied into it, and results
    and gradients out of it; the model's state is read where it lies, and where it has moved the
    program is recorded again.

    Args:
        call: the compiled program.
        state: how many of its arguments, the first ones, are parameters and buffers.
        roots: the places of the results at which backwards begin.
    """

    def __init__(self, call: Compiled, state: int, roots: Collection[int]) -> None:
        self._call, self._state, self.roots = call, state, roots
        self._replay: Compiled | None = None
        self._places: list[int] = []
        self._read: list[tuple[torch.Tensor, int]] = []  # the state, with the versions of values
        self._calls = 0

    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The program's results. Raises :class:`RunError` where it cannot be recorded."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise RunError(
                "cuda_graphs=True: the call is within torch.autograd.graph.saved_tensors_hooks, "
                "which see no tensors of a CUDA graph: call outside, or compile without cuda_graphs"
            )
        state = arguments[: self._state]
        places = [x.data_ptr() for x in state]
        if self._replay is None or places != self._places:
            self._replay, self._places = None, places  # the memory of the old one goes first
            self._replay = self._record(arguments)
        self._calls += 1
        results = self._replay(*_OwnGradients.apply(*arguments))
        self._read = [(x, x._version) for x in state]
        return _OwnResults.apply(self, self._calls, *results)  # type: ignore[no-any-return]

    def check_backward(self, number: int) -> None:
        """Raises :class:`RunError` where the backward of call ``number`` would read other values
        than its forward left.
        """
        if number != self._calls:
            raise RunError(
                f"cuda_graphs=True: the backward of call {number} came after call {self._calls}, "
                "whose forward took the memory of its saved tensors: run each backward before the "
                "next forward, or compile without cuda_graphs"
            )
        if any(x._version != version for x, version in self._read):
            raise RunError(
                "cuda_graphs=True: a parameter or buffer was changed in place between the forward "
                "and its backward, such as by optimizer.step(): run the backward before, or "
                "compile without cuda_graphs"
            )

    def _record(self, arguments: Sequence[torch.Tensor]) -> Compiled:
        held = [x.detach() for x in arguments[: self._state]]
        held += [x.detach().clone() for x in arguments[self._state :]]
        for mine, x in zip(held, arguments, strict=True):
            mine.requires_grad_(x.requires_grad)
        try:
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                graphed = torch.cuda.make_graphed_callables(
                    self._call, tuple(held), allow_unused_input=True
                )
        except RuntimeError as e:
            reason = next(iter(str(e).strip().splitlines()), "")[:300]
            raise RunError(
                f"cuda_graphs=True: the program could not be recorded: {reason}. Compile without "
                "cuda_graphs"
            ) from e
        return graphed  # type: ignore[return-value]


class _OwnGradients(torch.autograd.Function):
    """Arguments of a replay, whose gradients get memory of their own."""

    @staticmethod
    def forward(ctx: Any, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        made = tuple(x.detach() for x in arguments)
        ctx.mark_non_differentiable(
            *(new for new, x in zip(made, arguments, strict=True) if not x.requires_grad)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        there = [g for g in gradients if g is not None]
        own = [torch.empty_like(g) for g in there]
        if there:
            torch._foreach_copy_(own, there)
        left = iter(own)
        return tuple(None if g is None else next(left) for g in gradients)


class _OwnResults(torch.autograd.Function):
    """Results of a replay in memory of their own."""

    @staticmethod
    def forward(
        ctx: Any, graphs: CudaGraphs, number: int, *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.graphs, ctx.number = graphs, number
        made = tuple(x.clone() for x in results)
        ctx.mark_non_differentiable(*(x for i, x in enumerate(made) if i not in graphs.roots))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.graphs.check_backward(ctx.number)
        return (None, None, *gradients)
