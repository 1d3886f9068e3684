"""Compiled programs of one GPU as CUDA graphs: the host starts a forward, or a backward, in one
call, however many kernels it has.

This file has the private name of torch for the hooks on saved tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import RunError, first_line
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

    A replay reads and writes the memory of the recording. So results and gradients are copied out
    of it, and arguments into it, but the parameters and buffers that last from call to call: they
    are read where they lie, and where one has moved the program is recorded again.

    Args:
        call: the compiled program.
        lasting: the places of such arguments, and whether each is a parameter.
        roots: the places of the results at which backwards begin.
    """

    def __init__(self, call: Compiled, lasting: Mapping[int, bool], roots: Collection[int]) -> None:
        self._call, self._lasting, self.roots = call, lasting, roots
        self._replay: Compiled | None = None
        self._places: list[int] = []
        self._held: list[torch.Tensor] = []  # the arguments of the recording
        self._read: list[tuple[torch.Tensor, int]] = []  # parameters, with the versions of values
        self._calls = 0

    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The program's results. Raises :class:`RunError` where it cannot be recorded."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise RunError(
                "cuda_graphs=True: the call is within torch.autograd.graph.saved_tensors_hooks, "
                "which see no tensors of a CUDA graph: call outside, or compile without cuda_graphs"
            )
        places = [arguments[i].data_ptr() for i in self._lasting]
        if self._replay is None or places != self._places:
            self._replay, self._held = None, []  # the memory of the old one goes first
            self._places, self._replay = places, self._record(arguments)
        self._calls += 1
        results = self._replay(*_Arguments.apply(self, *arguments))
        # The backward has copies of buffers, which the program itself changes after its forward.
        parameters = [arguments[i] for i, is_parameter in self._lasting.items() if is_parameter]
        self._read = [(x, x._version) for x in parameters]
        return _OwnResults.apply(self, self._calls, *results)  # type: ignore[no-any-return]

    def hold(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies the arguments that do not last to where the recording reads them. Returns its
        arguments.
        """
        copies = defaultdict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]](list)
        for i in set(range(len(arguments))).difference(self._lasting):
            copies[arguments[i].dtype].append((self._held[i], arguments[i]))
        for pairs in copies.values():  # torch copies tensors of one dtype in few kernels
            there, here = zip(*pairs, strict=True)
            torch._foreach_copy_([x.detach() for x in there], [x.detach() for x in here])
        return self._held

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
                "cuda_graphs=True: a parameter was changed in place between the forward and its "
                "backward, such as by optimizer.step(): run the backward before, or compile "
                "without cuda_graphs"
            )

    def _record(self, arguments: Sequence[torch.Tensor]) -> Compiled:
        try:
            self._held = [
                (x.detach() if i in self._lasting else _copied(x)).requires_grad_(x.requires_grad)
                for i, x in enumerate(arguments)
            ]
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                graphed = torch.cuda.make_graphed_callables(
                    self._call, tuple(self._held), allow_unused_input=True
                )
        except RuntimeError as e:
            raise RunError(
                f"cuda_graphs=True: the program could not be recorded: {first_line(e)}. Compile "
                "without cuda_graphs"
            ) from e
        return graphed  # type: ignore[return-value]


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which compiled code depends on."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return like.copy_(x.detach())


class _Arguments(torch.autograd.Function):
    """The arguments of a recording in place of those of a call, which get gradients in memory of
    their own.
    """

    @staticmethod
    def forward(ctx: Any, graphs: CudaGraphs, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        made = tuple(x.detach() for x in graphs.hold(arguments))
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
        return None, *(None if g is None else next(left) for g in gradients)


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
