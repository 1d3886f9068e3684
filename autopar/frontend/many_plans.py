"""Makes many plans, in as many processes as there are cores for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from tqdm import tqdm

from autopar.errors import AutoparError, without_frames
from autopar.frontend.forked_workers import forked, worker_count
from autopar.frontend.kept_models import ModelGraphs
from autopar.frontend.kept_plans import KnownPlan
from autopar.frontend.planner import make_plan
from autopar.frontend.traced_model import TracedModel
from autopar.plan import Plan

Outcome = Plan | AutoparError
Question = tuple[TracedModel, Mapping[str, Any]]  # the options, with world_size and cluster


def plan_many(asked: Sequence[Question], bar: tqdm[Any]) -> list[Outcome]:
    """The plan or the error of each question, in order. ``bar`` counts them.

    The kernels that ``profile_missing`` measures would be slower beside other work. Then this
    process plans alone.

    Raises:
        RunError: a process that planned ended before it answered.
    """
    is_measuring = any(options.get("profile_missing") for _, options in asked)
    workers = 1 if is_measuring else worker_count(len(asked))
    if workers > 1:
        return _shared(asked, bar, workers)
    outcomes = []
    for question in asked:
        outcomes.append(_outcome(*question))
        bar.update()
    return outcomes


def _shared(asked: Sequence[Question], bar: tqdm[Any], workers: int) -> list[Outcome]:
    """The outcomes that processes share among them. What they find is kept in this one, too."""

    def work(number: int) -> tuple[Outcome, tuple[Hashable, KnownPlan] | None]:
        traced, options = asked[number]
        outcome = _outcome(traced, options)
        return outcome, traced.graphs.plans.newest() if isinstance(outcome, Plan) else None

    found: dict[int, Outcome] = {}
    with ExitStack() as locks:
        # A worker would wait for ever for a lock that another thread of this process holds.
        for graphs in _traced(asked):
            locks.enter_context(graphs.lock)
        for number, (outcome, kept) in forked(work, len(asked), workers):
            found[number] = outcome
            if kept is not None:
                asked[number][0].graphs.plans.keep(*kept)
            bar.update()
    return [found[number] for number in range(len(asked))]


def _traced(asked: Sequence[Question]) -> list[ModelGraphs]:
    """The graphs of all questions, traced in this process. Where a trace fails, the worker traces
    again, and has the error as the outcome.
    """
    found: list[ModelGraphs] = []
    for traced in dict.fromkeys(traced for traced, _ in asked):
        with suppress(AutoparError):
            found.append(traced.graphs)
    return found


def _outcome(traced: TracedModel, configuration: Mapping[str, Any]) -> Outcome:
    options = dict(configuration)
    try:
        return make_plan(traced, options.pop("world_size"), options.pop("cluster"), False, options)
    except AutoparError as e:
        return without_frames(e)
