"""What plan() and compile() share: the graph of one microbatch; and the choice of how many microbatches there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from autopar.analysis import Analysis
from autopar.capture import Captured, capture
from autopar.cost_model import Cluster
from autopar.errors import BudgetError, PlanError
from autopar.passes.batch_constants import restore_batch_constants
from autopar.passes.canonicalise import canonicalise
from autopar.passes.evaluation import evaluates_alike
from autopar.passes.microbatch import accumulate
from autopar.plan import Plan
from autopar.report import describe
from autopar.search.decide import best_plan
from autopar.search.options import Options

LossFunction = Callable[[Any, Any], torch.Tensor]


class Planner:
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
        batch = batch_size(self.sample)
        counts = [m for m in (2**i for i in range(batch.bit_length())) if batch % m == 0]
        failure: PlanError | None = None
        for microbatches in counts:
            try:
                return self._search(microbatches)
            except BudgetError as e:
                failure = e
            except PlanError as e:  # so many cannot be had
                failure = failure or e
                break
        assert failure is not None
        raise failure

    def _with_size(self, size: int) -> Plan:
        """The best plan whose microbatches have ``size`` samples a data-parallel replica."""
        batch, world = batch_size(self.sample), self.options.world_size
        best: Plan | None = None
        failure: PlanError | None = None
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
            if isinstance(failure, BudgetError):
                raise failure
            degrees = " or ".join(map(str, self.options.data_degrees()))
            why = failure or f"the batch must be a multiple of {size} x the data-parallel size, {degrees}"
            asked = f"{size} sample{'s' * (size > 1)} a microbatch"
            raise PlanError(f"micro_batch_size={size}: a batch of {batch} on {world} ranks has no plan with {asked}: {why}")
        return best

    def _search(self, microbatches: int) -> Plan:
        start = time.perf_counter()
        self._step(f"capturing ({microbatches} microbatches)" if microbatches > 1 else "capturing")
        analysis, _ = analyse(self.model, self.sample, self.loss_fn, microbatches)
        captured = time.perf_counter() - start
        plan, found = best_plan(analysis, self.cluster, self.options, microbatches, self._step)
        plan = describe(plan, analysis, found)
        plan.timings["capture"] = captured
        plan.timings["total"] = time.perf_counter() - start
        return plan

    def _step(self, what: str) -> None:
        self.bar.set_postfix_str(what)
        self.bar.update()


def analyse(model: nn.Module, sample: Any, loss_fn: LossFunction | None, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
    """The graph of one microbatch, and the graph of what is counted over the batch before."""
    whole = _trace(model, sample, loss_fn)
    if microbatches == 1:
        return Analysis(whole), None
    size = batch_size(sample)
    part = tree_map(lambda x: x[: size // microbatches] if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == size else x, sample)
    captured = _trace(model, part, loss_fn)
    restore_batch_constants(captured.graph, whole.graph)
    captured, prologue = accumulate(Analysis(captured), microbatches)
    return Analysis(captured), prologue


def evaluates_as_trained(model: nn.Module, sample: Any, loss_fn: LossFunction | None, trained: Captured | None = None) -> bool:
    """Whether ``eval()`` changes nothing but dropout and BatchNorm; ``trained`` is the graph of the whole batch, where it is at hand."""
    modes = {module: module.training for module in model.modules()}
    try:
        evaluated = canonicalise(capture(model.eval(), sample, loss_fn))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return evaluates_alike(trained or _trace(model, sample, loss_fn), evaluated)


def _trace(model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> Captured:
    modes = {module: module.training for module in model.modules()}
    try:
        if not model.training:  # what is planned is training; eval() is a pass
            model.train()
        return canonicalise(capture(model, sample, loss_fn))
    finally:
        for module, mode in modes.items():
            module.training = mode


def plain(sample: Any) -> Any:
    """A dict of keywords where ``sample`` is another mapping, such as a tokenizer's BatchEncoding."""
    return dict(sample) if isinstance(sample, Mapping) else sample


def batch_size(sample: Any) -> int:
    sizes: list[int] = []
    tree_map(lambda x: sizes.append(x.shape[0]) if isinstance(x, torch.Tensor) and x.ndim else None, sample)
    return max(sizes, key=sizes.count) if sizes else 1
