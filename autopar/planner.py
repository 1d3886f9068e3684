"""What plan() and compile() share: the graph of one microbatch; and the choice of how many microbatches there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from autopar.analysis import Analysis
from autopar.capture import Captured, capture
from autopar.cost_model import Cluster
from autopar.passes.batch_constants import restore_batch_constants
from autopar.passes.canonicalise import canonicalise
from autopar.passes.evaluation import evaluates_alike
from autopar.passes.microbatch import accumulate
from autopar.plan import Plan
from autopar.precision import dtype_of
from autopar.profile.missing import Missing
from autopar.report import describe
from autopar.search.decide import write_down
from autopar.search.known import Known
from autopar.search.options import Options
from autopar.search.outer import best
from autopar.search.resize import resized
from autopar.search.searches import Searches
from autopar.search.turns import taking_turns

LossFunction = Callable[[Any, Any], torch.Tensor]


class Traced:
    """A model and a batch; what is asked of them is traced once."""

    def __init__(self, model: nn.Module, sample: Any, loss_fn: LossFunction | None, precision: str | None = None) -> None:
        self.model, self.sample, self.loss_fn, self.precision = model, plain(sample), loss_fn, precision
        self._analyses: dict[int, tuple[Analysis, fx.Graph | None]] = {}
        self._known: dict[tuple[bool, Cluster, bool], Known] = {}

    @cached_property
    def whole(self) -> Captured:
        """The graph of the whole batch."""
        return _trace(self.model, self.sample, self.loss_fn, self.precision)

    def analyse(self, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
        """The graph of one microbatch, and the graph of what is counted over the batch before."""
        if microbatches not in self._analyses:
            self._analyses[microbatches] = _in_parts(self.whole, self.model, self.sample, self.loss_fn, microbatches, self.precision)
        return self._analyses[microbatches]

    def known(self, microbatches: int, cluster: Cluster, profile_missing: bool = False) -> Known:
        """What is known for a search of this many microbatches: the graph of a microbatch stands for one of any size, so that of the first
        that was asked for serves them all."""
        key = microbatches > 1, cluster, profile_missing
        if key not in self._known:
            known = next((k for (parts, *_), k in self._known.items() if parts == key[0]), None)
            analysis = known.analysis if known else self.analyse(microbatches)[0]
            self._known[key] = Known(analysis, cluster, self.precision == "tf32", Missing(cluster) if profile_missing else None)
        return self._known[key]

    def evaluates(self) -> bool:
        """Whether ``eval()`` changes nothing but dropout and BatchNorm."""
        modes = {module: module.training for module in self.model.modules()}
        try:
            evaluated = canonicalise(capture(self.model.eval(), self.sample, self.loss_fn, dtype_of(self.precision)))
        finally:
            for module, mode in modes.items():
                module.training = mode
        return evaluates_alike(self.whole, evaluated)


class Planner:
    """One call of plan(): captures what the search asks for, and searches."""

    def __init__(self, traced: Traced, cluster: Cluster, options: Options, progress: bool) -> None:
        self.traced, self.cluster, self.options = traced, cluster, options
        self.capturing = 0.0
        self.bar = tqdm(desc="planning", unit=" steps", disable=not progress, leave=False)

    def run(self) -> Plan:
        start = time.perf_counter()
        samples = batch_size(self.traced.sample)
        searches = Searches(self._known, samples, self.options, self._step)
        with self.bar:
            found = best(searches)
            self._step("reporting")
            with resized(found.analysis, samples // found.microbatches, found.analysis.rules):
                plan = describe(write_down(found, self.cluster, self.options, searches.timings), found)
                plan = taking_turns(plan, found, self.cluster.device.ranks_per_core)
        plan.timings["capture"] = self.capturing
        plan.timings["total"] = time.perf_counter() - start
        return plan

    def _known(self, microbatches: int) -> Known:
        start = time.perf_counter()
        self._step(f"capturing ({microbatches} microbatches)" if microbatches > 1 else "capturing")
        known = self.traced.known(microbatches, self.cluster, self.options.profile_missing)
        self.capturing += time.perf_counter() - start
        return known

    def _step(self, what: str) -> None:
        self.bar.set_postfix_str(what)
        self.bar.update()


def _in_parts(
    whole: Captured, model: nn.Module, sample: Any, loss_fn: LossFunction | None, microbatches: int, precision: str | None
) -> tuple[Analysis, fx.Graph | None]:
    if microbatches == 1:
        return Analysis(whole), None
    size = batch_size(sample)
    samples = max(size // microbatches, min(2, size))  # rules see no dim of one sample; costs are worked out for any number of them
    part = tree_map(lambda x: x[:samples] if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == size else x, sample)
    captured = _trace(model, part, loss_fn, precision)
    restore_batch_constants(captured.graph, whole.graph)
    captured, prologue = accumulate(Analysis(captured), microbatches)
    return Analysis(replace(captured, fingerprint=whole.fingerprint)), prologue


def _trace(model: nn.Module, sample: Any, loss_fn: LossFunction | None, precision: str | None) -> Captured:
    modes = {module: module.training for module in model.modules()}
    try:
        if not model.training:  # what is planned is training; eval() is a pass
            model.train()
        return canonicalise(capture(model, sample, loss_fn, dtype_of(precision)))
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
