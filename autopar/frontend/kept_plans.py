"""The plans that searches of one model found to their end, for calls with the same options."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from autopar.plan import Plan

MOST_PLANS = 16


class KnownPlan(NamedTuple):
    """A plan, and what writes the program of its configuration to a path; None for a plan of
    another process.
    """

    plan: Plan
    write_program: Callable[[str], None] | None


class KeptPlans:
    """The plans that were asked for last."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, KnownPlan] = OrderedDict()

    def find(self, key: Hashable) -> KnownPlan | None:
        """The plan of a cluster and options; None where there is none."""
        return self._plans.get(key)

    def newest(self) -> tuple[Hashable, KnownPlan] | None:
        """The key and the plan that were kept last, in a form for another process."""
        if not self._plans:
            return None
        key, known = next(reversed(self._plans.items()))
        return key, known._replace(write_program=None)

    def keep(self, key: Hashable, known: KnownPlan) -> None:
        """Keeps a plan until others follow. Only the newest keeps its problem, which may be large,
        to write its program from.
        """
        if (newest := self.newest()) is not None:
            self._plans[newest[0]] = newest[1]
        self._plans[key] = known
        self._plans.move_to_end(key)
        if len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)


def copied(plan: Plan, **changes: Any) -> Plan:
    """The plan with these changes, and with dicts and lists of its own, which a user may change."""
    own = {f.name: _copied(getattr(plan, f.name)) for f in dataclasses.fields(plan)}
    stages = tuple(
        dataclasses.replace(stage, seconds=dict(stage.seconds), nbytes=dict(stage.nbytes))
        for stage in plan.stages
    )
    return Plan(**{**own, "stages": stages, **changes})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
