"""Which solvers there are: HiGHS, called directly, and all that PuLP knows."""

from __future__ import annotations

import warnings
from typing import Any

import pulp

from autopar.errors import PlanError

PREFIX = "pulp:"  # of a solver's name in the options
# Names that PuLP's users know, and PuLP's own names.
_ALIASES = {"CBC": "COIN_CMD", "SCIP": "SCIP_CMD", "CPLEX": "CPLEX_CMD", "GLPK": "GLPK_CMD"}


def check_solver(solver: str) -> None:
    """Check the name of a solver: "highs", or "pulp:" and a name that PuLP knows.

    Raises:
        PlanError: there is no solver of this name, or it is not installed.
    """
    if solver == "highs":
        return
    name = _pulp_name(solver)
    if not solver.startswith(PREFIX) or name not in pulp.listSolvers():
        raise PlanError(
            f'solver={solver!r}: give "highs", or "{PREFIX}NAME" with one of '
            f"{', '.join(pulp.listSolvers())}"
        )
    if not make_solver(solver).available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            here = ", ".join(pulp.listSolvers(onlyAvailable=True))
        raise PlanError(
            f"solver={solver!r}: PuLP knows {name} but does not find it on this machine; it finds "
            f"{here}"
        )


def make_solver(solver: str, **options: Any) -> Any:
    """PuLP's solver that the options name. "pulp:CBC" is the CBC of this machine, or else the one
    that comes with PuLP 3.
    """
    name = _pulp_name(solver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will come without a CBC
        made = pulp.getSolver(name, msg=False, **options)
        if name == "COIN_CMD" and not made.available() and "PULP_CBC_CMD" in pulp.listSolvers():
            return pulp.getSolver("PULP_CBC_CMD", msg=False, **options)
    return made


def _pulp_name(solver: str) -> str:
    name = solver.removeprefix(PREFIX)
    return _ALIASES.get(name, name)
