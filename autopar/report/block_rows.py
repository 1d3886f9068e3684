"""Rows of the operators in each block of the model. Blocks that are planned alike share their rows,
in whatever pipeline stages they are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from autopar.ir.nodes import numel, operands, shape
from autopar.report.mode_words import mode_word
from autopar.report.module_paths import Instance, ModulePaths
from autopar.report.split_words import SplitWords, is_loss
from autopar.rules.analysis import Analysis
from autopar.search.ilp.vertex import Vertex
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.strategies import ParameterStrategy, Strategy

Row = list[Any]
_Line = tuple[str, str, str, tuple[str, ...], str]  # module, operator, shape, words, mode


class BlockRows:
    """The blocks of a plan's graph.

    Attributes:
        group_of: the number of each block's group; blocks that are planned alike are one group.
    """

    def __init__(self, analysis: Analysis, found: PricedPlan, names: ModulePaths) -> None:
        self._names, words = names, analysis.cached(SplitWords)
        shown = [_shown(v, found, words) for v in found.problem.vertices]
        inside: dict[Instance, list[_Line]] = defaultdict(list)
        # lines outside blocks, and each block at the place of its first line
        self._order: list[Instance | _Line] = []
        for node in analysis.graph.nodes:
            instance, module = names.split(node)
            line = shown[found.problem.vertex_of[node]] if node in found.problem.vertex_of else None
            if instance is None and line is not None:
                self._order.append((module, *line))
            elif instance is not None:
                if line is not None and not inside[instance]:
                    self._order.append(instance)
                inside[instance] += [(module, *line)] if line is not None else []
        self.group_of: dict[Instance, int] = {}
        self._lines: list[list[_Line]] = []
        self._members: list[list[Instance]] = []
        numbers: dict[tuple, int] = {}
        for instance, lines in inside.items():
            n = self.group_of[instance] = numbers.setdefault((instance[0], *lines), len(numbers))
            if n == len(self._members):
                self._members.append([])
                self._lines.append(lines)
            self._members[n].append(instance)

    def rows(self) -> list[Row]:
        """``rows["blocks"]`` of a plan, in the order of the graph."""
        found: list[Row] = []
        done: set[int] = set()
        for place in self._order:
            if len(place) > 2:
                module, operator, text, words, mode = place
                found.append(["", 1, module or "(root)", operator, text, list(words), mode])
            elif (n := self.group_of[place]) not in done:
                done.add(n)
                found += self._of_blocks(self._members[n], self._lines[n])
        return found

    def _of_blocks(self, members: list[Instance], lines: list[_Line]) -> list[Row]:
        prefix = members[0][0]
        label = self._names.label(prefix, [number for _, number in members])
        if len(members) > 1:
            return [
                [label, len(members), module, operator, text, list(words), mode]
                for module, operator, text, words, mode in lines
            ]
        return [
            ["", 1, ".".join(filter(None, (label, module))), operator, text, list(words), mode]
            for module, operator, text, words, mode in lines
        ]


def _shown(
    vertex: Vertex, found: PricedPlan, words: SplitWords
) -> tuple[str, str, tuple[str, ...], str] | None:
    """Operator, shape, words and mode of a node; None for a node that the report leaves out."""
    node, choice = vertex.node, found.choice(vertex.node)
    operator = words.operator(node)
    if operator is None or not isinstance(choice, Strategy):
        return None
    weights = words.weights(node)
    largest = max(weights, key=lambda k: numel(weights[k]), default=None)
    text = [
        words.word(node, factor, choice.out[axis].kind)
        for axis, factor in enumerate(choice.factors)
    ]
    storage = found.choice(weights[largest]) if largest is not None else None
    parts = [False] * len(text)
    if isinstance(storage, ParameterStrategy):
        parts = [
            s.is_shard and not u.is_shard for s, u in zip(storage.stored, storage.used, strict=True)
        ]
    mode = mode_word(node, choice, found, text, any(parts))
    text = [f"{word}, ZeRO" if part else word for word, part in zip(text, parts, strict=True)]
    shown = node if largest is None and not is_loss(node) else operands(node)[largest or 0][0]
    return operator, "x".join(map(str, shape(shown))), tuple(text), mode
