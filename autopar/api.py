"""plan() and compile(): what happens, from top to bottom."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from autopar.analysis import Analysis
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, PlanError, RunError
from autopar.passes.lower import Lowered, lower
from autopar.passes.stages import cut_stages
from autopar.plan import Plan
from autopar.planner import LossFunction, Planner, Traced, batch_size
from autopar.profile import check_machine
from autopar.runtime.agree import same_on_all_ranks, together
from autopar.runtime.mesh import Mesh
from autopar.runtime.program import Compiled
from autopar.runtime.typecheck import check_types
from autopar.search.options import Options
from autopar.search.schedules import check_schedule


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
    """Decide how to train ``model`` on ``world_size`` devices. Needs no GPU and no process group.

    Args:
        model: any module that ``torch.export`` takes, on CPU, GPU or the meta device. It is not changed.
        sample_input: a tensor, a tuple of positional arguments or a dict of keywords, with the shapes of the global batch.
        world_size: devices.
        cluster: a preset's name (``"cpu"``, ``"a100-sxm"``, ``"h100-sxm"``), a file or a :class:`Cluster`; by default "cpu" for a model
            on the CPU.
        loss_fn: ``loss_fn(output, batch)``, for a model that does not return its loss.
        progress: whether to show a progress bar.
        options: see :class:`Options`.

    Raises:
        CaptureError: the model could not be traced, or has no loss.
        PlanError: no plan meets the options.
    """
    return planned(Traced(model, sample_input, loss_fn, options.get("precision")), world_size, cluster, progress, options)


def compile(
    model: nn.Module,
    sample_input: Any,
    world_size: int,
    *,
    plan: Plan | None = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Compiled:
    """Make ``model`` a distributed program: called and trained like the model itself. Call it in each rank, under ``torchrun``.

    Args:
        plan: a plan made before, for the same model and sample; without one, rank 0 plans and the others receive it.

    The other arguments are those of :func:`plan`.

    Raises:
        RunError: the world size is not the process group's, or ranks hold different models or plans.
        CaptureError, PlanError: as :func:`plan`.
    """
    device, precision = _device(model), plan.precision if plan else options.get("precision")
    traced = Traced(model, sample_input, loss_fn, precision)
    _join_group(world_size, device)
    together("compile", partial(_check, world_size, device, traced.sample, plan, options))
    same_on_all_ranks("given" if plan else "to be made", "the plan")
    together("tracing the model", lambda: traced.whole)
    if plan is None:
        plan = _plan_on_rank_0(partial(_planned_here, traced, device, world_size, cluster, progress, options))
    same_on_all_ranks(repr(dataclasses.replace(plan, timings={})), "the plan")
    if plan.microbatches > 1 and batch_size(traced.sample) == plan.microbatches:
        alone = f"{plan.microbatches} microbatches of a single sample over all ranks of a stage can be priced, but not run yet"
        raise PlanError(f"{alone}: plan with micro_batch_size=2, or split the batch over ranks too")
    analysis, prologue = together("tracing a microbatch", partial(traced.analyse, plan.microbatches))
    found = analysis.captured.fingerprint
    same_on_all_ranks(found + _described(analysis.captured.state), "the model")
    if found != plan.fingerprint:
        raise RunError(f"the plan was made for a graph with fingerprint {plan.fingerprint}, this model and sample give {found}: plan again")
    if len(plan.stages) > 1:
        check_schedule(plan.schedule, plan.pipeline, plan.chunks, plan.microbatches)
        analysis = cut_stages(analysis, [stage.start for stage in plan.stages[1:]])
    mesh = Mesh(plan.mesh_sizes, plan.mesh_names, None if device.type == "meta" else device, pipeline=plan.pipeline, modes=plan.modes)
    lowered = lower(analysis, plan, prologue, mesh.device)
    _check_types(analysis, lowered, mesh)
    evaluates = together("tracing the model in eval()", traced.evaluates)
    return Compiled(analysis.captured, plan, lowered, mesh, model=model, evaluates=evaluates)


def _check_types(analysis: Analysis, lowered: Lowered, mesh: Mesh) -> None:
    """The second opinion: another type system must infer the layouts that the plan claims."""
    if mesh.size == 1:
        return
    trainable = {n.name for n in analysis.differentiable}
    values, layouts = [], []
    for n in lowered.train.graph.nodes:
        if n.op == "placeholder" and n.name != "mesh":
            values.append(torch.empty(n.meta["local"], dtype=n.meta["val"].dtype, device="meta", requires_grad=n.name in trainable))
            layouts.append(n.meta["layout"])
    check_types(lowered.train, mesh, values, layouts)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options``, if they are options; PlanError where one is not."""
    names = [n for n in Options.__dataclass_fields__ if n != "world_size"]
    if unknown := sorted(map(str, set(options) - set(names))):
        raise PlanError(f"unknown option {', '.join(unknown)}: the options are {', '.join(names)}")
    return options


def _device(model: nn.Module) -> torch.device:
    found = {p.device.type: p.device for p in model.parameters()}
    if len(found) > 1:
        raise RunError(f"the model's parameters are on {' and '.join(sorted(found))}: move it to one device first")
    return next(iter(found.values()), torch.device("cpu"))


def cluster_of(cluster: Any, model: nn.Module) -> Cluster:
    """The cluster that was asked for; the CPU's for a model that lies there."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        if (device := _device(model).type) != "cpu":
            raise PlanError(
                f"the model is on {device}: say what it will train on, cluster= one of {', '.join(Cluster.presets())}, or a file"
            )
        cluster = "cpu"
    if not isinstance(cluster, (str, os.PathLike)):
        raise PlanError(f"cluster={cluster!r}: give one of {', '.join(Cluster.presets())}, a cluster file's path, or a Cluster")
    return Cluster.load(cluster)


def _join_group(world_size: int, device: torch.device) -> None:
    """Use the process group there is; make one under torchrun, or for a single process."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        elif world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            raise RunError(
                f"compile(world_size={world_size}) needs {world_size} processes: start it with torchrun --nproc-per-node {world_size}"
            )


def _check(world_size: int, device: torch.device, sample: Any, plan: Plan | None, options: dict[str, Any]) -> None:
    """What can be seen to be wrong before anything is done."""
    ranks = dist.get_world_size()
    if ranks != world_size:
        raise RunError(f"compile was asked for world_size={world_size}, the process group has {ranks} ranks: pass world_size={ranks}")
    if plan is not None and plan.world_size != world_size:
        raise RunError(f"the plan is for world_size={plan.world_size}, compile was asked for {world_size}: plan again for {world_size}")
    if plan is None:
        Options(world_size, **known_options(options))
    if plan is not None and options:
        unused = ", ".join(sorted(options))
        raise PlanError(f"plan= decides everything, so {unused} would have no effect: give the options to autopar.plan")
    for path, leaf in tree_flatten_with_path(sample)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type != "meta":
            place = f"sample_input{keystr(path)} is on {leaf.device}, the model on {device}"
            raise RunError(f"{place}: a batch must lie where the model does, so pass it .to({str(device)!r})")


def _described(state: dict[str, torch.Tensor]) -> str:
    """What of a model's tensors the program is built on, also of those that the graph does not use."""
    return repr([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in state.items()])


def planned(traced: Traced, world_size: int, cluster: Any, progress: bool, options: dict[str, Any]) -> Plan:
    """:func:`plan`, of a model that may be traced already."""
    chosen = Options(world_size, **known_options(options))
    hardware = cluster_of(cluster, traced.model)
    hardware.check(world_size)
    return Planner(traced, hardware, chosen, progress).run()


def _planned_here(traced: Traced, device: torch.device, world_size: int, cluster: Any, progress: bool, options: dict[str, Any]) -> Plan:
    """Planned where it will run: a profile must be of this machine."""
    hardware = cluster_of(cluster, traced.model)
    check_machine(hardware, device)
    return planned(traced, world_size, hardware, progress, options)


def _plan_on_rank_0(planned: Callable[[], Plan]) -> Plan:
    """Planned once, so that all ranks hold one plan; an error is every rank's."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [planned()]
        except AutoparError as e:
            outcome = [e]
        except BaseException as e:
            dist.broadcast_object_list([RunError(f"planning failed on rank 0: {type(e).__name__}: {e}")], src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], AutoparError):
        raise outcome[0]
    return outcome[0]
