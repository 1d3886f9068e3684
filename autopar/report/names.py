"""Module paths for people: one name for all blocks that share their decisions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import torch.fx as fx

from autopar.analysis import Analysis
from autopar.search.found import Found

_NUMBER = re.compile(r"^(.*?\b)(\d+)\b\.?(.*)$")


class Names:
    """Module paths, with one name for all blocks that share their decisions."""

    def __init__(self, analysis: Analysis, found: Found) -> None:
        self._state = {n: i.target.rpartition(".")[0] or i.target for n, i in analysis.state.items()}
        self._numbers: dict[str, set[int]] = defaultdict(set)
        self._members: dict[int, set[int]] = defaultdict(set)
        for node, v in found.problem.vertex_of.items():
            if match := _NUMBER.match(self._path(node)):
                self._numbers[match[1]].add(int(match[2]))
                self._members[v].add(int(match[2]))
        self._vertex_of = found.problem.vertex_of

    def split(self, node: fx.Node) -> tuple[str, str]:
        """``("model.layers.*", "self_attn.q_proj")``; ``("", path)`` outside numbered blocks."""
        path = self._path(node)
        match = _NUMBER.match(path)
        if match is None:
            return "", path
        members = self._members[self._vertex_of[node]]
        every = members == self._numbers[match[1]] and len(members) > 1
        return match[1] + ("*" if every else _ranges(members)), match[3]

    def _path(self, node: fx.Node) -> str:
        return self._state.get(node, node.meta.get("module", "")) or ""


def _ranges(numbers: Iterable[int]) -> str:
    """``{1, 2, 3, 7}`` as ``1-3,7``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
