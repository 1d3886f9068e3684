"""Makes a plan: checks the options and the cluster, searches, and writes the plan."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from autopar.cost_model import Cluster
from autopar.errors import PlanError, RunError
from autopar.frontend.kept_plans import KnownPlan, copied
from autopar.frontend.plan_files import PlanFile, plan_file
from autopar.frontend.traced_model import TracedModel, batch_size
from autopar.ir.plan_json import option_as_json
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.plan import Plan
from autopar.profile import check_machine
from autopar.report import add_report_rows
from autopar.search.ilp.memory_prices import MemoryPrices
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.search_cache import SearchCache
from autopar.search.outer_search import best_plan
from autopar.search.plan_check.check_plan import check_plan
from autopar.search.pricing.resize import resized
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.share_cores import share_cores
from autopar.search.result.write_plan import write_plan
from autopar.search.space.backend import check_software
from autopar.search.space.check_offload import check_offload
from autopar.search.space.options import Options

_NEW_OBJECTS = 20_000  # after which the garbage collector looks for garbage among them


class Planner:
    """Makes one plan, and shows a progress bar meanwhile.

    It captures the graphs that the search asks for; ``capture_seconds`` counts the time, and
    ``timings`` the time of each phase of the search. After :meth:`run`, ``write_program`` writes
    the program of the plan's configuration to a path.
    """

    def __init__(
        self, traced: TracedModel, cluster: Cluster, options: Options, progress: bool
    ) -> None:
        self.traced, self.cluster, self.options = traced, cluster, options
        self.capture_seconds, self.timings = 0.0, dict[str, float]()
        self.file: PlanFile | None = None
        self.is_final = True  # whether more time would find no other plan
        self.write_program: Callable[[str], None] | None = None
        self.bar = tqdm(desc="planning", unit=" steps", disable=not progress, leave=False)

    def run(self, asked: dict[str, Any]) -> Plan:
        """The plan: that of an earlier call with the same model, options and cluster, or else the
        plan that the search finds.

        Args:
            asked: the options as the user gave them.

        Raises:
            PlanError: there is no plan.
        """
        start = time.perf_counter()
        check_software(self.options, self.cluster)
        check_offload(self.options, self.cluster)
        with rare_garbage_collection(), self.bar:
            self._step("capturing")
            graphs = self.traced.graphs
            self.capture_seconds += time.perf_counter() - start
            key = self.cluster, repr(self.options)
            with graphs.lock:
                known = graphs.plans.find(key) or self._kept_in_file() or self._search(start)
                if self.is_final:
                    graphs.plans.keep(key, known)
        self.write_program = known.write_program or self._search_and_write
        phases = self.timings | {
            "capture": self.capture_seconds,
            "total": time.perf_counter() - start,
        }
        return copied(known.plan, timings=phases, options=option_as_json(asked))

    def _kept_in_file(self) -> KnownPlan | None:
        """The plan that another process found, if it is kept and is a program of the graph."""
        self.file = plan_file(self.traced.graphs.whole, self.cluster, self.options)
        plan = self.file.read() if self.file is not None else None
        if self.file is None or plan is None:
            return None
        try:
            analysis = self.traced.analyse(plan.microbatches)[0]
            if len(plan.stages) > 1:
                analysis = cut_stages(analysis, [stage.start for stage in plan.stages[1:]])
            check_plan(plan, analysis)
        except PlanError as e:
            self.file.refuse(f"it does not fit the model: {e}")
            return None
        return KnownPlan(plan, None)

    def _search_and_write(self, path: str) -> None:
        """Searches, and writes the program of the plan's configuration to a path."""
        with self.traced.graphs.lock:
            found = self._search(time.perf_counter())
            assert found.write_program is not None
            found.write_program(path)

    def _search(self, started: float) -> KnownPlan:
        """The plan that the search finds; ``started`` as for :class:`InnerSearches`."""
        samples = batch_size(self.traced.sample)
        searches = InnerSearches(self._search_cache, samples, self.options, self._step, started)
        best = best_plan(searches)
        self._step("reporting")
        found = best.plan
        with resized(found.analysis, samples // found.microbatches, found.analysis.rules):
            plan = self._written(found)
        plan = dataclasses.replace(
            plan,
            gap=best.gap,
            configuration_gap=best.configuration_gap,
            compared=best.compared,
            not_searched=best.not_searched,
        )
        self.timings, self.is_final = searches.timings, not searches.has_compared_enough()
        if self.file is not None and self.is_final:
            self.file.write(plan)
        known = KnownPlan(plan, self._program(searches, found))
        searches.forget()
        return known

    def _program(self, searches: InnerSearches, found: PricedPlan) -> Callable[[str], None]:
        """What writes the program of a plan's configuration, without all else that was searched."""
        search, in_microbatch = searches.of_configuration(found.configuration)
        solved = search.prices(found.configuration, in_microbatch)
        prices = MemoryPrices(solved.problem, solved.weights)
        prices.solved.update(solved.solved)
        return partial(prices.write_program, search.budget(found.configuration))

    def _written(self, found: PricedPlan) -> Plan:
        """A plan that the search found, as data."""
        options = self.options
        key = (
            *map(id, (found.problem, found.costs, found.solution, found.counted_bytes)),
            *(found.gap, found.step_prices, self.cluster),
            *(options.world_size, options.precision, options.reduction_dtype, options.backend),
        )

        def write() -> tuple[PricedPlan, Plan]:
            plan = add_report_rows(write_plan(found, self.cluster, options, {}), found)
            shared = share_cores(plan, found, self.cluster.device.ranks_per_core)
            return found, Plan.of(shared)  # the priced plan keeps its ids its own

        return self.traced.graphs.written.of(key, write)[1]

    def _search_cache(self, microbatches: int) -> SearchCache:
        start = time.perf_counter()
        self._step(f"capturing ({microbatches} microbatches)")
        cache = self.traced.search_cache(microbatches, self.cluster, self.options.profile_missing)
        self.capture_seconds += time.perf_counter() - start
        return cache

    def _step(self, what: str) -> None:
        self.bar.set_postfix_str(what)
        self.bar.update()


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Planning and lowering allocate millions of objects that live until the end. With Python's own
    thresholds, the garbage collector would look at all of them again and again: a quarter of the
    time. Nor does it look at the objects that were there before, a million of torch's: a tenth of
    the time.
    """
    before, leaves_out_old = gc.get_threshold(), gc.get_freeze_count() == 0
    gc.set_threshold(max(before[0], _NEW_OBJECTS) if before[0] else 0, *before[1:])
    if leaves_out_old:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if leaves_out_old:
            gc.unfreeze()


def make_plan(
    traced: TracedModel,
    world_size: int,
    cluster: Any,
    progress: bool,
    options: dict[str, Any],
    keep_program: bool = False,
) -> Plan:
    """:func:`autopar.plan`, for a model that may be traced already.

    Args:
        keep_program: whether the plan can write its problem, which takes memory.
    """
    chosen = Options(world_size, **check_option_names(options))
    hardware = resolve_cluster(cluster, traced.model).run_by(chosen.backend)
    hardware.check(world_size)
    check_sample(traced.sample)
    asked = {
        "world_size": world_size,
        "cluster": hardware.name if cluster is None else cluster,
        **options,
    }
    if traced.loss_fn is not None:
        asked["loss_fn"] = traced.loss_fn
    planner = Planner(traced, hardware, chosen, progress)
    plan = planner.run(asked)
    if keep_program and planner.write_program is not None:
        return plan.with_program(planner.write_program)
    return plan


def make_plan_on_this_machine(
    traced: TracedModel,
    device: torch.device,
    world_size: int,
    cluster: Any,
    progress: bool,
    options: dict[str, Any],
) -> Plan:
    """Like :func:`make_plan`, on the machine that will train: a profile must be of this machine."""
    check_machine(resolve_cluster(cluster, traced.model), device)
    return make_plan(traced, world_size, cluster, progress, options)


def check_option_names(options: dict[str, Any]) -> dict[str, Any]:
    """``options``, after a check of their names.

    Raises:
        PlanError: a name is no option.
    """
    names = [n for n in Options.__dataclass_fields__ if n != "world_size"]
    if unknown := sorted(map(str, set(options) - set(names))):
        raise PlanError(f"unknown option {', '.join(unknown)}: the options are {', '.join(names)}")
    return options


def check_sample(sample: Any) -> None:
    """Raises PlanError for an empty batch."""
    if not batch_size(sample):
        raise PlanError(
            "sample_input is a batch of no samples: give one of the size that will be trained on"
        )


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's parameters; the CPU for a model without parameters.

    Raises:
        PlanError: ``model`` is no module.
        RunError: the parameters are on several devices.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model={model!r:.100}: give an nn.Module")
    found = {p.device.type: p.device for p in model.parameters()}
    if len(found) > 1:
        raise RunError(
            f"the model's parameters are on {' and '.join(sorted(found))}: move it to one device "
            "first"
        )
    return next(iter(found.values()), torch.device("cpu"))


def resolve_cluster(cluster: Any, model: nn.Module) -> Cluster:
    """The cluster that the user asked for; by default "cpu" for a model on the CPU.

    Raises:
        PlanError: there is no such cluster, or the model is on another device and ``cluster`` is
            None.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        if (device := model_device(model).type) != "cpu":
            raise PlanError(
                f"the model is on {device}: say what it will train on, cluster= one of "
                f"{', '.join(Cluster.presets())}, or a file"
            )
        cluster = "cpu"
    if not isinstance(cluster, (str, os.PathLike)):
        raise PlanError(
            f"cluster={cluster!r}: give one of {', '.join(Cluster.presets())}, a cluster file's "
            "path, or a Cluster"
        )
    return Cluster.load(cluster)
