"""The calls of each stage of a graph, and which of them repeat; the same for all plans."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send


class Operand(NamedTuple):
    """One operand of a call.

    Attributes:
        node: the tensor.
        home: the place, in the sequence of the reader's stage, of the call that makes the tensor;
            for a parameter or an input, of its first reader. -1 where no call of the stage is that.
        number: for a parameter or an input, the operand's number in its first reader; else -1.
    """

    node: fx.Node
    home: int
    number: int


class StageSequence:
    """The calls of one stage, in the order of the graph. Lists have one entry for each call.

    Attributes:
        nodes: the calls.
        kinds: a number, equal for equal calls.
        operands: the operands; none for a call that receives a tensor of the stage before.
        last_readers: the place of the last call that reads the result; ``sys.maxsize`` where
            another stage or the user reads the result.
        gaps: how many places further an equal call stands that reads equal operands; 0 for none.
        sent: the calls of the next stage that receive tensors from this stage.
    """

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []
        self.kinds: list[int] = []
        self.operands: list[tuple[Operand, ...]] = []
        self.last_readers: list[int] = []
        self.gaps: list[int] = []
        self.sent: list[fx.Node] = []

    def add(self, node: fx.Node, kind: int, found: tuple[Operand, ...]) -> None:
        """Adds a call at the end."""
        self.last_readers.append(len(self.nodes))
        self.nodes.append(node)
        self.kinds.append(kind)
        self.operands.append(found)

    def find_gaps(self) -> None:
        """Fills in :attr:`gaps`."""
        next_of_kind: dict[int, int] = {}
        for place in range(len(self.nodes) - 1, -1, -1):
            kind = self.kinds[place]
            gap = next_of_kind.get(kind, place) - place
            self.gaps.append(gap if gap and self._reads_equal_operands(place, gap) else 0)
            next_of_kind[kind] = place
        self.gaps.reverse()

    def _reads_equal_operands(self, place: int, gap: int) -> bool:
        """Whether the call that stands ``gap`` places further reads the operands of the call at
        ``place``: ``gap`` places further, too, or the same tensors where they are older than that.
        """
        for one, other in zip(self.operands[place], self.operands[place + gap], strict=True):
            if one.home < 0 or place - one.home > gap:
                if one.node is not other.node:
                    return False
            elif one.home + gap != other.home or one.number != other.number:
                return False
        return True


class StagedCalls:
    """The calls of a graph by stage.

    Attributes:
        stages: the calls of each stage. A call that each stage makes for itself is in the stage
            that needs it, or in none where several do.
        places: the stage of each call, and its place there.
        kinds: a number for each placeholder, equal for equal placeholders.
        uses: pairs (stage, name) of the parameters and buffers that stages use, in the order of
            first use. The stage is None for calls that each stage makes for itself.
        inputs: pairs (stage, placeholder) of the inputs that stages read.
        names: the names of parameters and buffers, by placeholder.
        written: the placeholders of buffers to which the program writes a new value.

    Args:
        analysis: the analysis of a graph; in a graph that is cut into stages, ``meta["stage"]`` of
            a node gives its stage.
        stages: the number of stages.
        representative: for each node, the node that stands for it in equal blocks. A node that is
            left out stands for itself.
    """

    def __init__(
        self, analysis: Analysis, stages: int, representative: Mapping[fx.Node, fx.Node]
    ) -> None:
        self._representative = representative
        self.names = {node: state.target for node, state in analysis.state.items()}
        self._numbers: dict[tuple[fx.Node, bool, bool], int] = {}
        self._only_stage = _only_stages(analysis)
        self._first_reads: dict[fx.Node, tuple[int | None, int, int]] = {}
        self._returned = {n for n in analysis.outputs if isinstance(n, fx.Node)}
        self.written = _written_state(analysis)
        self.stages = [StageSequence() for _ in range(stages)]
        self.places: dict[fx.Node, tuple[int, int]] = {}
        self.kinds: dict[fx.Node, int] = {}
        self.uses: dict[tuple[int | None, str], None] = {}
        self.inputs: set[tuple[int | None, fx.Node]] = set()
        for node in analysis.graph.nodes:
            if node.op == "placeholder":
                self.kinds[node] = self._kind(node)
            elif node.op == "call_function":
                self._add(node)
        for sequence in self.stages:
            sequence.find_gaps()

    @classmethod
    def of_single_nodes(cls, analysis: Analysis) -> StagedCalls:
        """The calls of a graph of which none counts as equal to another."""
        stages = {stage_of(node) for node in analysis.graph.nodes}
        return cls(analysis, 1 + max((stage for stage in stages if stage), default=0), {})

    def _add(self, node: fx.Node) -> None:
        """Adds a call to its stage."""
        stage = self._only_stage[node]
        sequence = self.stages[stage or 0]
        place, found = len(sequence.nodes), []
        for number, (operand, _) in enumerate(operands(node)):
            if operand.op == "placeholder":
                self._note_use(operand, stage_of(node))
                first = self._first_reads.setdefault(operand, (stage, place, number))
                found.append(Operand(operand, *(first[1:] if first[0] == stage else (-1, -1))))
            else:
                found.append(Operand(operand, self._home(operand, stage, place), -1))
        if stage is None:
            return
        if node.target is send:  # what the stage before makes is as good from any stage
            self.stages[stage - 1].sent.append(node)
            found.clear()
        sequence.add(node, self._kind(node), tuple(found))
        self.places[node] = stage, place
        if node in self._returned:
            sequence.last_readers[place] = sys.maxsize

    def _home(self, operand: fx.Node, stage: int | None, reader: int) -> int:
        """The place of the call ``operand`` in ``stage``, or -1; notes its reader."""
        if operand not in self.places:
            return -1
        at, place = self.places[operand]
        readers = self.stages[at].last_readers
        readers[place] = max(readers[place], reader if at == stage else sys.maxsize)
        return place if at == stage else -1

    def _note_use(self, placeholder: fx.Node, stage: int | None) -> None:
        if placeholder in self.names:
            self.uses[stage, self.names[placeholder]] = None
        else:
            self.inputs.add((stage, placeholder))

    def _kind(self, node: fx.Node) -> int:
        """The number of equal nodes. What the program returns or writes is equal to no other."""
        is_single = node in self._returned or node in self.written
        equal = node if is_single else self._representative.get(node, node)
        key = equal, is_single, stage_of(node) is None
        return self._numbers.setdefault(key, len(self._numbers))


def stage_of(node: fx.Node) -> int | None:
    """The stage of a call; None for a call that each stage makes for itself, and for inputs."""
    return node.meta.get("stage", 0) if node.op == "call_function" else None


def _only_stages(analysis: Analysis) -> dict[fx.Node, int | None]:
    """The one stage that needs each call; None where several stages need it."""
    found: dict[fx.Node, int | None] = {}
    for node in reversed(analysis.graph.nodes):
        if node.op == "call_function":
            own = stage_of(node)
            needed = {own} if own is not None else {found.get(user) for user in node.users}
            found[node] = needed.pop() if len(needed) == 1 else None
    return found


def _written_state(analysis: Analysis) -> set[fx.Node]:
    """The placeholders of buffers to which the program writes a new value."""
    updates = analysis.captured.updates
    placeholders = {i.target: n for n, i in analysis.state.items()}
    return {placeholders[target] for target in updates if target in placeholders}
