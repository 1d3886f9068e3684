"""Module paths in reports: the repeated blocks of a model have one name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import torch.fx as fx

from autopar.rules.analysis import Analysis

_NUMBER = re.compile(r"^(.*?\b)(\d+)\b\.?(.*)$")
_MAX_RANGES = 5  # ranges of block numbers that a label shows
Instance = tuple[str, int]  # a block: ("model.layers.", 7)


class ModulePaths:
    """The module paths of a graph's nodes, and labels for several blocks."""

    def __init__(self, analysis: Analysis) -> None:
        self._state = {
            n: i.target.rpartition(".")[0] or i.target for n, i in analysis.state.items()
        }
        self._known: dict[fx.Node, tuple[Instance | None, str]] = {}
        self._numbers: dict[str, set[int]] = defaultdict(set)
        for node in analysis.graph.nodes:
            instance, _ = self.split(node)
            if instance is not None:
                self._numbers[instance[0]].add(instance[1])

    def split(self, node: fx.Node) -> tuple[Instance | None, str]:
        """The block of a node and the module path inside the block.

        For example ``(("model.layers.", 7), "self_attn.q_proj")``; outside numbered blocks
        ``(None, path)``.
        """
        if node not in self._known:
            path = self._state.get(node, node.meta.get("module", "")) or ""
            match = _NUMBER.match(path)
            self._known[node] = (
                (None, path) if match is None else ((match[1], int(match[2])), match[3])
            )
        return self._known[node]

    def label(self, prefix: str, numbers: Iterable[int]) -> str:
        """``model.layers.*`` for all blocks of a model, ``model.layers.0-3,7`` for some of them."""
        members = set(numbers)
        return prefix + (
            "*" if members == self._numbers[prefix] and len(members) > 1 else _ranges(members)
        )


def _ranges(numbers: Iterable[int]) -> str:
    """``{1, 2, 3, 7}`` as ``1-3,7``; of many ranges the first ones and the last one."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    found = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(
        found if len(found) <= _MAX_RANGES else [*found[: _MAX_RANGES - 1], "…", found[-1]]
    )
