"""sweep(): many configurations of one model, each with its plan or the reason why it has none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, overload

from torch import nn
from tqdm import tqdm

from autopar.cost_model import Cluster
from autopar.errors import AutoparError, BudgetError, PlanError
from autopar.formatting.table import WIDTH, format_bytes, format_seconds, table, truncate
from autopar.frontend.many_plans import Outcome, plan_many
from autopar.frontend.planner import check_option_names, resolve_cluster
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import LossFunction
from autopar.ir.precision import COMPUTE_DTYPES
from autopar.plan import Plan

# the headers of some options
_SHORT = {"world_size": "devices", "micro_batch_size": "micro batch", "memory_budget": "budget"}
Configuration = Mapping[str, Any]


def sweep(
    model: nn.Module,
    sample_input: Any,
    configurations: Iterable[Configuration],
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Plan one model for each of many configurations, in a fraction of the time of :func:`plan`.

    The model is traced once. The plans are those of :func:`plan`. On Linux without a GPU, forked
    processes plan, one for each core that this process may use, eight at most. This process plans
    by itself elsewhere, where it may use one core (``taskset -c 0``), and where a configuration has
    ``profile_missing``.

    Args:
        model, sample_input, loss_fn: as for :func:`plan`.
        configurations: dicts of the options of :func:`plan`, with ``world_size`` and optionally
            ``cluster``.
        cluster: the cluster of configurations that give none.
        progress: whether to show a progress bar.
        options: options of all configurations. The options in a configuration take precedence.

    Raises:
        CaptureError: the model could not be traced, or has no loss.
        PlanError: there is no configuration, or a configuration is no dict, has no world size, or
            has an unknown option. This is checked before anything is planned. A configuration
            without a plan raises nothing; its outcome is the error.
        RunError: a process that planned ended before it answered.
    """
    asked = _checked(configurations, options)
    if any("cluster" not in each for each in asked):
        common = resolve_cluster(cluster, model)
        asked = tuple({"cluster": common, **each} for each in asked)
    precisions = dict.fromkeys(map(_precision, asked))  # each precision has its own graph
    traced = {
        precision: TracedModel(model, sample_input, loss_fn, precision) for precision in precisions
    }
    _ = traced[_precision(asked[0])].whole  # a model that cannot be traced raises here
    bar = tqdm(desc="sweep", total=len(asked), unit=" plans", disable=not progress, leave=False)
    with bar:
        outcomes = plan_many([(traced[_precision(each)], each) for each in asked], bar)
    return Sweep(asked, tuple(outcomes))


def _checked(
    configurations: Iterable[Configuration], options: dict[str, Any]
) -> tuple[Configuration, ...]:
    """The configurations with the common options; PlanError for an invalid configuration."""
    is_list = isinstance(configurations, Iterable)
    if not is_list or isinstance(configurations, (Mapping, str)):
        raise PlanError(
            f"configurations={configurations!r}: give a list of dicts, for example "
            "[dict(world_size=8)]"
        )
    asked = [_with_common(i, own, options) for i, own in enumerate(configurations)]
    if not asked:
        raise PlanError(
            "configurations is empty: give one dict of options at least, for example "
            "[dict(world_size=8)]"
        )
    return tuple(asked)


def _with_common(number: int, own: Any, options: dict[str, Any]) -> Configuration:
    """One configuration with the common options; PlanError for an invalid configuration."""
    where = f"configurations[{number}]"
    if not isinstance(own, Mapping):
        raise PlanError(
            f"{where} is {own!r}: give a dict of options, for example dict(world_size=8)"
        )
    each = {**options, **own}
    if "world_size" not in each:
        raise PlanError(
            f"{where} has no world_size: say for how many devices, for example dict(world_size=8)"
        )
    try:
        check_option_names({k: v for k, v in each.items() if k not in ("world_size", "cluster")})
    except PlanError as e:
        raise PlanError(f"{where} has an {e}") from e
    return each


def _precision(configuration: Configuration) -> str | None:
    """The precision of a configuration's graph; None for an invalid precision, which has no
    plan.
    """
    found = configuration.get("precision")
    return found if isinstance(found, str) and found in COMPUTE_DTYPES else None


@dataclass(frozen=True, repr=False)
class Sweep(Sequence[Outcome]):
    """The result of :func:`sweep`: for each configuration its :class:`Plan`, or the error.

    It prints as a table with the options that differ, the step time, the time relative to the
    fastest plan, and the memory of the fullest device; for a configuration that does not fit, the
    least memory that any plan needs. Other errors follow below the table.

    Attributes:
        configurations: the options of each configuration, with the common options.
        outcomes: the plan or the error of each.
    """

    configurations: tuple[Configuration, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Plan:
        """The fastest plan.

        Raises:
            PlanError: no configuration has one.
        """
        plans = [outcome for outcome in self.outcomes if isinstance(outcome, Plan)]
        if not plans:
            raise PlanError(
                f"none of {len(self.outcomes)} configurations has a plan; the first: "
                f"{next(iter(self.outcomes), '')}"
            )
        return min(plans, key=lambda plan: plan.step_time)

    def __len__(self) -> int:
        return len(self.outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    @overload
    def __getitem__(self, index: int) -> Outcome: ...
    @overload
    def __getitem__(self, index: slice) -> Sweep: ...
    def __getitem__(self, index: int | slice) -> Outcome | Sweep:
        if isinstance(index, slice):
            return Sweep(self.configurations[index], self.outcomes[index])
        return self.outcomes[index]

    def __str__(self) -> str:
        columns = _differing([_cells(each) for each in self.configurations])
        fastest = min(
            (plan.step_time for plan in self.outcomes if isinstance(plan, Plan)), default=0.0
        )
        rows = []
        for i, outcome in enumerate(self.outcomes):
            rows.append(
                [str(i), *(column[i] for column in columns.values()), *_found(outcome, fastest)]
            )
        align = (
            "r"
            + "".join(
                "r" if all(c.isdecimal() for c in column if c) else "l"
                for column in columns.values()
            )
            + "rrrl"
        )
        text = table(rows, ["", *columns, "step", "relative", "memory", "fits"], align)
        why = [
            f"{i}: {e}"
            for i, e in enumerate(self.outcomes)
            if isinstance(e, AutoparError) and not _short_of_memory(e)
        ]
        return "\n".join([text, *([""] if why else []), *(truncate(line, WIDTH) for line in why)])

    __repr__ = __str__


def _found(outcome: Outcome, fastest: float) -> list[str]:
    if isinstance(outcome, Plan):
        return [
            format_seconds(outcome.step_time),
            f"{outcome.step_time / fastest:.2f}",
            format_bytes(max(outcome.peak_memory)),
            "yes",
        ]
    return (
        ["", "", format_bytes(outcome.least), "no"]
        if _short_of_memory(outcome)
        else ["", "", "", "see below"]
    )


def _short_of_memory(error: AutoparError) -> TypeGuard[BudgetError]:
    """Whether the error says that memory is too small, with the least memory that is needed."""
    return isinstance(error, BudgetError) and error.least > 0


def _cells(configuration: Configuration) -> dict[str, str]:
    """The options of a configuration as cells, by the header of their column.

    Each kind of ``parallel`` has a column, and so has each of its keywords, such as the mode.
    """
    found: dict[str, str] = {}
    for name, value in configuration.items():
        if name != "parallel" or not isinstance(value, Mapping):
            found[_SHORT.get(name, name)] = (
                format_bytes(value)
                if name == "memory_budget" and isinstance(value, (int, float))
                else _text(value)
            )
            continue
        for kind, size in value.items():
            parts = size if isinstance(size, Mapping) else {"size": size}
            found |= {
                str(kind) if part == "size" else f"{kind} {part}": _text(one)
                for part, one in parts.items()
            }
    return found


def _text(value: Any) -> str:
    if isinstance(value, Cluster):
        return value.name
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ("x" if all(isinstance(part, int) for part in value) else ", ").join(
            map(_text, value)
        )
    return "" if value is None else str(value)


def _differing(configurations: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The columns whose cells differ between the configurations that have them."""
    names = dict.fromkeys(name for each in configurations for name in each)
    columns = {name: [each.get(name, "") for each in configurations] for name in names}
    return {
        name: column
        for name, column in columns.items()
        if len({cell for cell in column if cell or " " not in name}) > 1
    }
