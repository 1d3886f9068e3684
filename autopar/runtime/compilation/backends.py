"""The two ways in which the programs of a rank run: eager, operator after operator, or compiled by
inductor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from tqdm import tqdm

from autopar.errors import AutoparError, RunError, first_line
from autopar.ir.nodes import gradient_sources
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.stand_ins import runs_alone
from autopar.runtime.communication.watch.watchdog import blocking_section
from autopar.runtime.compilation.block_parts import cut_into_parts
from autopar.runtime.compilation.compiler_graph import CompilerGraph
from autopar.runtime.compilation.cuda_graphs import CudaGraphs
from autopar.runtime.compilation.inductor import (
    Compiled,
    collectives,
    compile_graph,
    random_operators,
)
from autopar.runtime.pipeline import recompute


class Backend(Protocol):
    """Runs programs, whole ones or those of stages."""

    def run(
        self,
        program: fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        roots: Collection[int],
    ) -> Sequence[torch.Tensor]:
        """The results of ``program`` for the tensors ``arguments``, as functions of them.

        ``roots`` are the places of the results at which backwards begin: the loss, and the tensors
        that go to the next stage.
        """


def make_backend(
    name: str,
    mesh: Mesh,
    progress: bool,
    lasting: Mapping[int, bool] | None = None,
    updated: Sequence[torch.Tensor] = (),
) -> Backend:
    """The backend ``name``, one of ``plan_data.BACKENDS``; see :class:`InductorBackend`."""
    if name != "inductor":
        return EagerBackend(mesh)
    return InductorBackend(mesh, progress, lasting, updated)


class EagerBackend:
    """Runs a program operator after operator."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def run(
        self,
        program: fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        roots: Collection[int],
    ) -> Sequence[torch.Tensor]:
        """See :class:`Backend`."""
        return recompute.run(program, self._mesh, arguments)


class InductorBackend:
    """Compiles each program at its first call. Later calls are compiled again only where something
    differs that the code depends on: which tensors require a gradient, strides, and settings of
    torch. A backward through a result that is not among ``roots`` raises :class:`RunError`.

    On a mesh of several ranks, each block of the model is compiled alone, and equal ones once: see
    :mod:`block_parts`.

    Arguments: ``progress``, whether to show a progress bar while a program is compiled;
    ``lasting``: programs with a backward run as CUDA graphs, and these are the places of arguments
    that stay in their memory from call to call, and whether each is a parameter; None for no CUDA
    graphs; ``updated``: buffers that change after a forward, of which programs get copies, because
    a backward may read their values once more.

    Attributes: ``compilations``, their number so far.
    """

    def __init__(
        self,
        mesh: Mesh,
        progress: bool,
        lasting: Mapping[int, bool] | None = None,
        updated: Sequence[torch.Tensor] = (),
    ) -> None:
        self._updated = {id(buffer): buffer for buffer in updated}
        self._mesh, self._progress, self._lasting = mesh, progress, lasting
        self._cut: dict[fx.GraphModule, fx.GraphModule | None] = {}
        self._compiled: defaultdict[fx.GraphModule, dict[Hashable, CompiledProgram]] = defaultdict(
            dict
        )
        self._made: dict[Hashable, CompiledProgram] = {}
        self._read_only: dict[Hashable, list[int]] = {}
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        self.compilations = 0
        if mesh.size > 1:
            mesh.make_all_groups()  # no group can be made while a program is traced

    def run(
        self,
        program: fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        roots: Collection[int],
    ) -> Sequence[torch.Tensor]:
        """See :class:`Backend`."""
        if self._updated and torch.is_grad_enabled():
            arguments = [x.clone() if id(x) in self._updated else x for x in arguments]
        if program not in self._cut:
            self._cut[program] = (
                cut_into_parts(program, roots, self._call) if self._mesh.size > 1 else None
            )
        cut = self._cut[program]
        if cut is None:
            self._mesh.arrivals.take_all()
            results = self._call(program, arguments, roots)
        else:
            results = recompute.run(cut, self._mesh, arguments)
        if not torch.is_grad_enabled():
            return results
        key = program, tuple([x.requires_grad for x in arguments])
        if key not in self._read_only:
            self._read_only[key] = _read_only_results(program, arguments, roots)
        results = list(results)
        for place in self._read_only[key]:
            results[place] = _ReadOnly.apply(results[place], self._anchor)
        return results

    def _call(
        self,
        program: fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        roots: Collection[int],
    ) -> Sequence[torch.Tensor]:
        """Calls a program, or that of a part."""
        known = self._compiled[program]
        key = _settings(self._mesh.device.type), tuple([_form(x) for x in arguments])
        if key not in known:
            # Hooks on saved tensors are those of the call and not of its tracing.
            with saved_tensors_hooks(_same, _same), blocking_section("compiling"):
                made = self._compile(program, arguments, roots, key)
            if not known and self._mesh.size > 1:
                # All ranks compile a program for the first time in the same call. Later they need
                # not.
                group = self._mesh.axes_group(range(len(self._mesh.sizes)))
                check_same_on_all_ranks(made.calls, "the order of compiled collectives", group)
            if self._lasting is not None and torch.is_grad_enabled():
                made = made._replace(call=CudaGraphs(made.call, self._lasting, roots))
            known[key] = made
        found = known[key]
        return found.call(*arguments, *self._moment(found.first_draw))

    def _moment(self, first_draw: int | None) -> list[torch.Tensor]:
        """The last argument of a program that draws random numbers."""
        if first_draw is None:
            return []
        seed, step, microbatch = self._mesh.random_streams.moment
        return [torch.tensor([seed or 0, step, microbatch, first_draw], device="cpu")]

    def _compile(
        self,
        program: fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        roots: Collection[int],
        settings: Hashable,
    ) -> CompiledProgram:
        graph = CompilerGraph(program, self._mesh, roots)
        shapes = tuple([(x.shape, x.dtype, x.device) for x in arguments])
        key = graph.structure(), shapes, settings
        if key in self._made:
            return self._made[key]._replace(first_draw=graph.first_draw)
        self.compilations += 1
        called: list[str] = []
        hidden = not self._progress or (dist.get_rank() != 0 and not runs_alone())
        with tqdm(desc="compiling", unit=" parts", disable=hidden, leave=False) as bar:

            def begin(part: fx.Graph) -> None:
                _check_random(part)
                called.extend(["a part", *collectives(part)])
                bar.update()

            examples = [*_examples(arguments), *self._moment(graph.first_draw)]
            call = _compile_or_explain(
                lambda: compile_graph(graph.module, examples, begin, self._mesh.size > 1)
            )
        self._made[key] = made = CompiledProgram(call, graph.first_draw, "\n".join(called))
        return made


class CompiledProgram(NamedTuple):
    """A compiled program.

    Attributes:
        call: computes it.
        first_draw: the number of its first call that draws random numbers; None where none does.
            If one does, ``call`` takes one more tensor: see :func:`random_masks.keep_mask`.
        calls: the collectives that it calls.
    """

    call: Compiled
    first_draw: int | None
    calls: str


def _same(x: Any) -> Any:
    return x


def _read_only_results(
    program: fx.GraphModule, arguments: Sequence[torch.Tensor], roots: Collection[int]
) -> list[int]:
    """The places of the results that would have a gradient in eager mode, besides ``roots``."""
    _, *inputs = program.graph.find_nodes(op="placeholder")
    with_gradient = [n for n, x in zip(inputs, arguments, strict=True) if x.requires_grad]
    sources = gradient_sources(program.graph.nodes, {n: i for i, n in enumerate(with_gradient)})
    results: Sequence[fx.Node] = program.graph.output_node().args[0]  # type: ignore[assignment]
    return [i for i, n in enumerate(results) if n in sources and i not in roots]


class _ReadOnly(torch.autograd.Function):
    """A result that backwards do not begin at. It requires a gradient, as in eager mode, so that
    autograd does not leave its gradient out in silence.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        raise RunError(
            "a gradient came back through an output that is not the loss: the program was compiled "
            "for the gradients of its own loss. Compute what you add in the model, or in "
            "loss_fn(output, batch); detach() an output that is only read; or plan with "
            'backend="eager"'
        )


def _check_random(part: fx.Graph) -> None:
    """Raises :class:`RunError` for random numbers that would differ from those of one device."""
    if found := random_operators(part):
        raise RunError(
            f'backend="inductor": the program draws random numbers in an operator that is not '
            f"traced apart ({found[0]}), such as a torch.autograd.Function: plan with "
            'backend="eager", or use dropout of torch.nn'
        )


def _compile_or_explain(compile_: Callable[[], Compiled]) -> Compiled:
    try:
        return compile_()
    except AutoparError:
        raise
    except Exception as e:
        raise RunError(
            f'backend="inductor" could not compile the program: {type(e).__name__}: '
            f'{first_line(e)}. Plan with backend="eager", or write the part of the model in other '
            "operators"
        ) from e


def _examples(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like ``arguments``, each a leaf and an object of its own: two arguments that are one
    tensor now need not be one in the next call.
    """
    return [x.detach().requires_grad_(x.requires_grad) for x in arguments]


def _form(x: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
    """What compiled code depends on in an argument, besides its shape and dtype, which stay."""
    return x.requires_grad, x.stride()


def _settings(device_type: str) -> Hashable:
    """The settings of torch on which compiled code depends."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
