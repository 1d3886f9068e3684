"""The plan that a user reads, edits, saves and loads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from autopar.errors import PlanError
from autopar.formatting.files import write_json, write_whole
from autopar.ir.plan_data import VERSION, PlanData
from autopar.ir.plan_json import read_plan, to_json_data
from autopar.report import chrome_trace, draw_timeline, report_text


@dataclasses.dataclass(frozen=True)
class Plan(PlanData):
    """A distributed program for one model, one sample input and one cluster.

    The attributes are those of :class:`autopar.ir.plan_data.PlanData`.
    """

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """The same plan, with the methods that a user calls."""
        return cls(**{f.name: getattr(data, f.name) for f in dataclasses.fields(PlanData)})

    def report(self) -> str:
        """A text with the mesh, the layout of each block, the collectives, memory and time."""
        return report_text(self)

    def timeline(self) -> str:
        """The timeline of a step as text: one row for each pipeline rank, one letter a phase."""
        return draw_timeline(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of a step as a trace for Perfetto or Chrome.

        Where writing fails, ``path`` stays unchanged.
        """
        write_json(path, chrome_trace(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Where writing fails, ``path`` stays unchanged."""
        write_json(path, {"version": VERSION, **to_json_data(self)}, indent=1)

    def write_problem(self, path: str | os.PathLike[str]) -> None:
        """Write the integer linear program of the plan's configuration for other solvers: as MPS
        or, where ``path`` ends with ".lp", in the LP format.

        The program has the price of memory that the plan was solved at. Vertices that need no
        variables have been eliminated from it. Where writing fails, ``path`` stays unchanged.

        Raises:
            PlanError: the plan was loaded or changed; or ``path`` has another ending.
        """
        write = self.__dict__.get("_write_program")
        if write is None:
            raise PlanError(
                "write_problem: this plan was loaded or changed, and its problem is not in it: "
                "call write_problem on what autopar.plan returns"
            )
        if not os.fsdecode(path).endswith((".mps", ".lp")):
            raise PlanError(f"path={path!r:.100}: give a path that ends with .mps or .lp")
        write_whole(path, write)

    def with_program(self, write: Callable[[str], None]) -> Plan:
        """The same plan, which can write its problem: ``write`` writes it to a path. It is no field
        of the plan, so that copies and files go without it.
        """
        plan = dataclasses.replace(self)
        object.__setattr__(plan, "_write_program", write)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the problem, which is not for other processes."""
        return {key: value for key, value in self.__dict__.items() if key != "_write_program"}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: the file cannot be read, holds no plan, has another version, or is damaged.
        """
        return read_plan(path, VERSION, Plan)
