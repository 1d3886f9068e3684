"""The stage cuts that the user fixes with ``split_before``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import torch.fx as fx

from autopar.errors import PlanError
from autopar.rules.analysis import Analysis


def user_cut_nodes(analysis: Analysis, modules: Sequence[str]) -> list[fx.Node]:
    """The first node of each of these modules, before which the graph is cut.

    Raises:
        PlanError: a name is no module of the graph, or its module begins where the model or the
            module named before it begins, or earlier.
    """
    calls = [
        n for n in analysis.graph.nodes if n.op == "call_function" and n not in analysis.duplicated
    ]
    paths = [n.meta.get("module", "") for n in calls]
    found: list[int] = []
    for name in modules:
        at = _first_call(paths, name)
        if at == 0:
            raise PlanError(
                f"split_before names {name!r}, where the model begins: stage 0 would be empty"
            )
        before = modules[len(found) - 1] if found else ""
        if found and at == found[-1]:
            what = "twice" if name == before else f"and {before!r}, which begin at one place"
            raise PlanError(f"split_before names {name!r} {what}: the stage between would be empty")
        if found and at < found[-1]:
            raise PlanError(
                f"split_before makes a cycle: {name!r} runs before {before!r}, so that stages "
                "would wait for one another; name the modules in the order in which they run"
            )
        found.append(at)
    return [calls[i] for i in found]


def _first_call(paths: Sequence[str], name: str) -> int:
    """The number of the first call inside a module; ``paths`` are the module paths of all calls."""
    for i, path in enumerate(paths):
        if path == name or path.startswith(name + "."):
            return i
    known = list(dict.fromkeys(p for path in paths for p in _path_and_parents(path)))
    near = get_close_matches(name, known, n=3, cutoff=0.3)
    raise PlanError(
        f"split_before names {name!r}, which is no module that runs; nearest: "
        f"{', '.join(near) or 'nothing'}"
    )


def _path_and_parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
