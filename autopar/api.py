"""plan() and compile(), as lists of steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar.cost_model import Cluster
from autopar.errors import RunError
from autopar.frontend.compile_arguments import check_arguments
from autopar.frontend.evaluation_trace import DeferredEvaluation, EvaluationTrace
from autopar.frontend.planner import (
    make_plan,
    make_plan_on_this_machine,
    model_device,
    rare_garbage_collection,
)
from autopar.frontend.traced_model import TracedModel, batch_size
from autopar.ir.batch_layouts import with_batch
from autopar.ir.captured import LossFunction
from autopar.ir.nodes import describe_node
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.passes.lowering.lower import LoweredModel, lower
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.all_ranks import (
    check_same_on_all_ranks,
    run_distributed,
    run_on_all_ranks,
)
from autopar.runtime.communication.groups import groups
from autopar.runtime.communication.join import join_group
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.watch.watchdog import blocking_section
from autopar.runtime.compilation.cuda_graphs import check_cuda_graphs
from autopar.runtime.module.call_guard import CallGuard
from autopar.runtime.module.compiled import Compiled
from autopar.runtime.step.program_variants import draws
from autopar.runtime.typecheck.checker import check_types
from autopar.search.plan_check.check_plan import check_batch, check_fingerprint, check_plan
from autopar.verification.few_samples import compare


def plan(
    model: nn.Module,
    sample_input: Any,
    world_size: int,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Plan:
    """Decide how to train ``model`` on ``world_size`` devices, without GPU and process group.

    Args:
        model: any module that ``torch.export`` takes, on CPU, GPU or the meta device. It stays
            unchanged.
        sample_input: a tensor, a tuple of positional arguments or a dict of keywords, with the
            shapes of the global batch.
        world_size: the number of devices.
        cluster: a preset's name (``"cpu"``, ``"a100-sxm"``, ``"h100-sxm"``), a file or a
            :class:`Cluster`; by default "cpu" for a model on the CPU.
        loss_fn: ``loss_fn(output, batch)``, for a model that does not return its loss.
        progress: whether to show a progress bar.
        options: see :class:`Options`.

    Raises:
        CaptureError: the model could not be traced, or has no loss.
        PlanError: no plan meets the options.
    """
    return make_plan(
        TracedModel(model, sample_input, loss_fn, options.get("precision")),
        world_size,
        cluster,
        progress,
        options,
        keep_program=True,
    )


@rare_garbage_collection()
def compile(
    model: nn.Module,
    sample_input: Any,
    world_size: int,
    *,
    plan: Plan | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    batch: str | None = None,
    timeout: float | None = None,
    progress: bool = True,
    verify: bool = True,
    cuda_graphs: bool = False,
    **options: Any,
) -> Compiled:
    """Make ``model`` a distributed program, which is called and trained like the model itself.

    Call it in each rank, under ``torchrun``. ``model`` keeps its values: train, evaluate and save
    the program.

    Args:
        plan: a plan for the same model and sample. Without a plan, rank 0 makes one and sends it to
            the other ranks.
        batch: what each rank passes to a call: ``"global"``, the whole batch, or ``"local"``, the
            samples of its data-parallel replica, see ``compiled.sampler``. Unless given, that of
            ``plan``, where a program was compiled with it, else ``"global"``.
        timeout: the seconds that a rank waits for another one, in every process group that the
            program makes, before all ranks raise an error. Unless given, that of the default
            process group.
        verify: whether rank 0 runs the model and its captured graph on a few samples of the sample
            input and compares the results, where weights and sample have values; see
            :func:`autopar.check`. Where a few samples cannot stand for the batch, or their results
            differ, it compares the whole batch.
        cuda_graphs: whether a training call is recorded as two CUDA graphs, of its forward and of
            its backward, which the host starts in one call each: for models whose kernels are so
            short that a GPU waits for the host. On one GPU, with ``backend="inductor"`` and without
            dropout. The memory of a step, and of gradients once more, stays taken between steps.

    The other arguments are those of :func:`plan`.

    Raises:
        RunError: the world size is not the size of the process group, ranks hold different models
            or plans, or the program cannot run as CUDA graphs.
        CaptureError, PlanError: as :func:`plan`.
    """
    device = model_device(model)
    precision = plan.precision if isinstance(plan, Plan) else options.get("precision")
    traced = TracedModel(model, sample_input, loss_fn, precision)
    own = join_group(world_size, device, timeout)
    make = partial(make_plan_on_this_machine, traced, own, world_size, cluster, progress, options)
    with blocking_section("compile"):
        check_same_on_all_ranks(f"{timeout}", "timeout=", dist.group.WORLD)
        groups().set_timeout(timeout)
        check = partial(check_arguments, world_size, device, traced, plan, options)
        if cuda_graphs:
            check_cuda_graphs(world_size, own.type)
        run_on_all_ranks("checking the arguments", check)
        check_same_on_all_ranks("to be made" if plan is None else "given", "the plan")
        # Each rank traces: rank 0 would first trace just as long, and then send what it has.
        run_on_all_ranks("tracing the model", lambda: traced.whole)
        ((notes, made),) = run_distributed(
            ("planning", partial(_verify_and_plan, traced, verify, make if plan is None else None))
        )
        plan = run_on_all_ranks("the batch", partial(with_batch, plan or made, batch))
        decided = dataclasses.replace(plan, timings={}, options={"batch": plan.batch})
        check_same_on_all_ranks(repr(decided), "the plan")
        return program_of_plan(traced, plan, notes, own, progress, cuda_graphs)


def program_of_plan(
    traced: TracedModel,
    plan: Plan,
    notes: list[str],
    device: torch.device,
    progress: bool,
    cuda_graphs: bool = False,
) -> Compiled:
    """The program of ``plan`` on this rank; ``notes`` go to those of the plan."""
    analysis, prologue = _graph_of_plan(traced, plan)
    mesh = _mesh_of_plan(plan, device)
    trace = run_on_all_ranks("tracing the model in eval()", lambda: EvaluationTrace(traced))
    lowered = lower(analysis, plan, prologue, mesh.device)
    captured = analysis.captured
    if cuda_graphs:
        backend = plan.backend_on(device.type)
        check_cuda_graphs(plan.world_size, device.type, backend, draws(lowered.train))
    evaluation = DeferredEvaluation(trace, lowered, captured, plan, prologue, mesh.device)
    notes = [*notes, *lowered.notes, *_check_types(analysis, lowered, mesh)]
    noted = dataclasses.replace(plan, notes=(*plan.notes, *notes)) if notes else plan
    made = captured, noted, lowered, mesh
    return Compiled(
        *made,
        model=traced.model,
        guard=CallGuard(traced.frozen_values()),
        evaluation=evaluation,
        progress=progress,
        cuda_graphs=cuda_graphs,
    )


def _mesh_of_plan(plan: Plan, device: torch.device) -> Mesh:
    return Mesh(
        plan.mesh_sizes,
        plan.mesh_names,
        device,
        pipeline=plan.pipeline,
        modes=plan.modes,
        pipeline_place=plan.pipeline_place,
        pipeline_order=plan.pipeline_order,
    )


def _graph_of_plan(traced: TracedModel, plan: Plan) -> tuple[Analysis, fx.Graph | None]:
    """The graph of one microbatch, cut into the plan's stages, and the graph of the values that are
    computed once for all microbatches.

    Raises:
        RunError: the plan was made for another graph, or ranks have different models.
        PlanError: the plan does not fit the batch or the graph.
    """
    check = partial(check_batch, plan, batch_size(traced.sample))
    run_on_all_ranks("checking the plan", check)  # a registered schedule may differ on one
    derive = partial(traced.analyse, plan.microbatches)
    analysis, prologue = run_on_all_ranks("deriving a microbatch", derive)
    captured = analysis.captured
    check_same_on_all_ranks(captured.fingerprint + captured.state_text, "the model")
    check_fingerprint(plan, analysis)
    if len(plan.stages) > 1:
        analysis = cut_stages(analysis, [stage.start for stage in plan.stages[1:]])
    run_on_all_ranks("checking the plan", partial(check_plan, plan, analysis))
    return analysis, prologue


def _check_types(analysis: Analysis, lowered: LoweredModel, mesh: Mesh) -> list[str]:
    """Checks that an independent type system infers the layouts of the plan.

    Returns notes on the nodes that this type system does not know.

    Raises:
        RunError: it infers another layout.
    """
    if mesh.size == 1:
        return []
    trainable = {n.name for n in analysis.may_require_grad}
    values, layouts = [], []
    for n in lowered.train.graph.nodes:
        if n.op == "placeholder" and n.name != "mesh":
            values.append(
                torch.empty(
                    n.meta["local"],
                    dtype=n.meta["val"].dtype,
                    device="meta",
                    requires_grad=n.name in trainable,
                )
            )
            layouts.append(n.meta["layout"])
    try:
        trusted = check_types(lowered.train, mesh, values, layouts)
    except RunError:
        raise
    except Exception as e:  # a program that the check cannot read may still be right
        return [f"the type check was not finished, {type(e).__name__}: {e}"]
    nodes = {n.name: n for n in lowered.train.graph.nodes}
    return list(
        dict.fromkeys(
            f"the type check does not know {describe_node(nodes[name])}" for name in trusted
        )
    )


def _verify_and_plan(
    traced: TracedModel, verify: bool, make: Callable[[], Plan] | None
) -> tuple[list[str], Plan | None]:
    """The notes of the comparison of captured graph and model, and the plan, if one is made."""
    return _verify(traced) if verify else [], make() if make is not None else None


def _verify(traced: TracedModel) -> list[str]:
    """Compares the captured graph with the model. Returns a note where nothing was compared."""
    problem = compare(traced.analyse(1)[0], traced.model, traced.sample, traced.loss_fn)
    return (
        [
            f"captured and eager were not compared: {problem}; autopar.check does it for a sample "
            "that fits"
        ]
        if problem
        else []
    )
