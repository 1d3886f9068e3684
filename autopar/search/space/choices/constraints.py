"""The layouts that the option ``constraints`` fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import Layout, format_layout, parse_layout
from autopar.rules.analysis import Analysis
from autopar.search.space.strategies import Choice, ParameterStrategy


def constrained_layouts(
    analysis: Analysis, representative: Mapping[fx.Node, fx.Node], constraints: Mapping[str, str]
) -> dict[fx.Node, Layout]:
    """The layouts that the user asks of parameters (the stored layout) and of the outputs of
    modules, by representative.

    Raises:
        PlanError: a pattern matches nothing, or its layout cannot be read.
    """
    names = {n: s.target for n, s in analysis.state.items()}
    calls = [n for n in analysis.graph.nodes if n.op == "call_function"]
    last = {n.meta.get("module", ""): n for n in calls}  # the last call of each module
    found: dict[fx.Node, Layout] = {}
    for pattern, text in constraints.items():
        matches = [n for n, name in names.items() if fnmatchcase(name, pattern)]
        matches += [n for module, n in last.items() if fnmatchcase(module, pattern)]
        if not matches:
            near = get_close_matches(pattern, [*names.values(), *last], n=3, cutoff=0.3)
            raise PlanError(
                f"constraint {pattern!r} matches no parameter and no module; nearest: "
                f"{', '.join(near) or 'nothing'}"
            )
        try:
            found.update((representative[n], parse_layout(text)) for n in matches)
        except ValueError as e:
            raise PlanError(f"constraint {pattern!r}: {e}") from e
    return found


def constrain(
    analysis: Analysis, node: fx.Node, choices: Sequence[Choice], layout: Layout
) -> list[Choice]:
    """The choices of a node that have the layout that the user asks for.

    Raises:
        PlanError: no choice has this layout.
    """
    layouts = [c.stored if isinstance(c, ParameterStrategy) else c.out for c in choices]
    left = [c for c, found in zip(choices, layouts, strict=True) if found == layout]
    if not left:
        possible = list(dict.fromkeys(map(format_layout, layouts)))
        name = (
            analysis.state[node].target
            if node in analysis.state
            else node.meta.get("module", node.name)
        )
        raise PlanError(
            f"constraint on {name!r}: layout {format_layout(layout)!r} is not possible on this "
            f"mesh; possible: {', '.join(possible[:20])}"
        )
    return left
