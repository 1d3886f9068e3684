"""plan() and compile(): what happens, from top to bottom."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from autopar.analysis import Analysis
from autopar.capture import capture
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, PlanError, RunError
from autopar.passes.canonicalise import canonicalise
from autopar.passes.lower import Lowered, lower
from autopar.passes.microbatch import accumulate
from autopar.plan import Plan
from autopar.report import describe
from autopar.runtime.mesh import Mesh
from autopar.runtime.program import Compiled, same_on_all_ranks
from autopar.runtime.typecheck import check_types
from autopar.search.decide import best_plan, fingerprint
from autopar.search.options import Options

LossFunction = Callable[[Any, Any], torch.Tensor]


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
    chosen = Options(world_size, **_known(options))
    hardware = _cluster(cluster, model)
    hardware.check(world_size)
    return _Planner(model, _plain(sample_input), loss_fn, hardware, chosen, progress).run()


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
    device = _device(model)
    _join_group(world_size, device)
    if plan is not None and plan.world_size != world_size:
        raise RunError(f"the plan is for world_size={plan.world_size}, compile was asked for {world_size}: plan again for {world_size}")
    if plan is None:
        plan = _plan_on_rank_0(model, sample_input, world_size, cluster=cluster, loss_fn=loss_fn, progress=progress, **options)
    elif unused := sorted(options):
        raise PlanError(f"plan= decides everything, so {', '.join(unused)} would have no effect: give the options to autopar.plan")
    same_on_all_ranks(repr((plan, sorted(plan.nodes.items()))), "the plan")
    analysis, prologue = _analyse(model, _plain(sample_input), loss_fn, plan.microbatches)
    found = fingerprint(analysis.graph)
    same_on_all_ranks(found, "the model's graph")
    if found != plan.fingerprint:
        raise RunError(f"the plan was made for a graph with fingerprint {plan.fingerprint}, this model and sample give {found}: plan again")
    mesh = Mesh(plan.mesh_sizes, plan.mesh_names, None if device.type == "meta" else device)
    lowered = lower(analysis, plan, prologue, mesh.device)
    _check_types(analysis, lowered, mesh)
    return Compiled(analysis.captured, plan, lowered, mesh, model=model)


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


class _Planner:
    """One call of plan(): captures for each number of microbatches tried, and searches."""

    def __init__(
        self, model: nn.Module, sample: Any, loss_fn: LossFunction | None, cluster: Cluster, options: Options, progress: bool
    ) -> None:
        self.model, self.sample, self.loss_fn, self.cluster, self.options = model, sample, loss_fn, cluster, options
        self.bar = tqdm(desc="planning", unit=" steps", disable=not progress, leave=False)

    def run(self) -> Plan:
        with self.bar:
            wanted = self.options.micro_batch_size
            return self._fitting() if wanted is None else self._with_size(wanted)

    def _fitting(self) -> Plan:
        """The fewest microbatches with which a plan fits memory."""
        batch = _batch_size(self.sample)
        failure: PlanError | None = None
        for microbatches in [m for m in (2**i for i in range(batch.bit_length())) if batch % m == 0]:
            try:
                return self._search(microbatches)
            except PlanError as e:
                if "memory budget" not in str(e):
                    raise
                failure = failure or e
                last = e
        raise PlanError(f"{last}, even in microbatches of one sample" if failure is not last else str(last))

    def _with_size(self, size: int) -> Plan:
        """The best plan whose microbatches have ``size`` samples a data-parallel replica."""
        batch, world = _batch_size(self.sample), self.options.world_size
        best: Plan | None = None
        failure = PlanError(f"data-parallel size x micro_batch_size must divide the batch of {batch}")
        for degree in self.options.data_degrees():
            if batch % (degree * size):
                continue
            try:
                plan = self._search(batch // (degree * size))
            except PlanError as e:
                failure = e
                continue
            if plan.data_degree == degree and (best is None or plan.step_time < best.step_time):
                best = plan
        if best is None:
            raise PlanError(
                f"micro_batch_size={size}: a batch of {batch} on {world} ranks has no plan with {size} samples a microbatch: {failure}"
            )
        return best

    def _search(self, microbatches: int) -> Plan:
        start = time.perf_counter()
        self._step(f"capturing ({microbatches} microbatches)" if microbatches > 1 else "capturing")
        analysis, _ = _analyse(self.model, self.sample, self.loss_fn, microbatches)
        captured = time.perf_counter() - start
        plan, found = best_plan(analysis, self.cluster, self.options, microbatches, self._step)
        plan = describe(plan, analysis, found)
        plan.timings["capture"] = captured
        plan.timings["total"] = time.perf_counter() - start
        return plan

    def _step(self, what: str) -> None:
        self.bar.set_postfix_str(what)
        self.bar.update()


def _analyse(model: nn.Module, sample: Any, loss_fn: LossFunction | None, microbatches: int) -> tuple[Analysis, Any]:
    """The graph of one microbatch, and the graph of what is counted over the batch before."""
    if microbatches > 1:
        size = _batch_size(sample)
        sample = tree_map(
            lambda x: x[: size // microbatches] if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == size else x, sample
        )
    modes = {module: module.training for module in model.modules()}
    try:
        if not model.training:  # what is planned is training; eval() is a pass
            model.train()
        analysis = Analysis(canonicalise(capture(model, sample, loss_fn)))
    finally:
        for module, mode in modes.items():
            module.training = mode
    if microbatches == 1:
        return analysis, None
    captured, prologue = accumulate(analysis, microbatches)
    return Analysis(captured), prologue


def _plain(sample: Any) -> Any:
    """A dict of keywords where ``sample`` is another mapping, such as a tokenizer's BatchEncoding."""
    return dict(sample) if isinstance(sample, Mapping) else sample


def _batch_size(sample: Any) -> int:
    sizes: list[int] = []
    tree_map(lambda x: sizes.append(x.shape[0]) if isinstance(x, torch.Tensor) and x.ndim else None, sample)
    return max(sizes, key=sizes.count) if sizes else 1


def _known(options: dict[str, Any]) -> dict[str, Any]:
    names = [n for n in Options.__dataclass_fields__ if n != "world_size"]
    if unknown := sorted(set(options) - set(names)):
        raise PlanError(f"unknown option {', '.join(unknown)}: the options are {', '.join(names)}")
    return options


def _device(model: nn.Module) -> torch.device:
    found = {p.device.type: p.device for p in model.parameters()}
    if len(found) > 1:
        raise RunError(f"the model's parameters are on {' and '.join(sorted(found))}: move it to one device first")
    return next(iter(found.values()), torch.device("cpu"))


def _cluster(cluster: Any, model: nn.Module) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        if (device := _device(model).type) != "cpu":
            raise PlanError(
                f"the model is on {device}: say what it will train on, cluster= one of {', '.join(Cluster.presets())}, or a file"
            )
        cluster = "cpu"
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
    ranks = dist.get_world_size()
    if ranks != world_size:
        raise RunError(f"compile was asked for world_size={world_size}, the process group has {ranks} ranks: pass world_size={ranks}")


def _plan_on_rank_0(model: nn.Module, sample: Any, world_size: int, **options: Any) -> Plan:
    """Planned once, so that all ranks hold one plan; an error is every rank's."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [plan(model, sample, world_size, **options)]
        except AutoparError as e:
            outcome = [e]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], AutoparError):
        raise outcome[0]
    return outcome[0]
