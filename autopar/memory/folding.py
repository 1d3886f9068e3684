"""Which calls of a plan's program stand for others: a block for all equal blocks of its stage, and
a stage for all equal stages.

Of a run of equal blocks, the first three and the last are traced. Only the first has nothing
before it, and only the last has nothing behind it. The third stands for all between. Whether it may
is checked by ``steady_state``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch.fx as fx

from autopar.ir.plan_data import ConversionStep, NodePlan, ParameterPlan
from autopar.memory.staged_calls import Operand, StagedCalls, StageSequence

TRACED_BLOCKS = 4  # of a run: the first three, and the last
LIKE_OTHERS = 2  # the number of the block that stands for those left out


class Program(Protocol):
    """The fields of a plan that make the program; see :class:`PlanData`."""

    @property
    def nodes(self) -> Mapping[str, NodePlan]: ...
    @property
    def parameters(self) -> Mapping[str, ParameterPlan]: ...
    @property
    def conversions(self) -> Mapping[str, Mapping[str, tuple[ConversionStep, ...]]]: ...
    @property
    def recomputed(self) -> Collection[str]: ...
    @property
    def offloaded(self) -> Collection[str]: ...
    @property
    def zero_buckets(self) -> Collection[Sequence[str]]: ...
    @property
    def prefetch(self) -> int: ...


class Run(NamedTuple):
    """Equal blocks of one stage, one behind the other.

    Attributes:
        start: the place of the first block's first call in the stage.
        length: the calls of a block.
        blocks: the number of blocks, more than TRACED_BLOCKS.
    """

    start: int
    length: int
    blocks: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.blocks

    @property
    def left_out(self) -> range:
        """The places of the calls that are not traced."""
        return range(self.start + (TRACED_BLOCKS - 1) * self.length, self.end - self.length)


class TracedBlock(NamedTuple):
    """A traced block: the number of its run in the stage, and its number among the traced ones."""

    run: int
    number: int

    @property
    def before(self) -> TracedBlock:
        return TracedBlock(self.run, self.number - 1)


class StageFold:
    """The calls of one stage, numbered without those that are not traced."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def number(self, place: int) -> int:
        """The number of a call, or of the traced call that stands for it."""
        skipped = 0
        for run in self.runs:
            left_out = run.left_out
            if place < left_out.start:
                break
            if place < left_out.stop:
                place -= (place - left_out.start) // run.length * run.length + run.length
                break
            skipped += len(left_out)
        return place - skipped

    def place(self, number: int) -> int:
        """The place of the traced call with a number."""
        for run in self.runs:
            if number >= run.left_out.start:
                number += len(run.left_out)
        return number

    def block(self, place: int) -> TracedBlock | None:
        """The block of a traced call; None where it is in no run."""
        for number, run in enumerate(self.runs):
            if run.start <= place < run.end:
                block = (place - run.start) // run.length
                return TracedBlock(number, min(block, TRACED_BLOCKS - 1))
        return None

    def blocks_left_out(self, place: int) -> int:
        """The number of blocks that are not traced before a place."""
        before = (run for run in self.runs if run.left_out.stop <= place)
        return sum(run.blocks - TRACED_BLOCKS for run in before)

    def is_left_out(self, place: int) -> bool:
        return any(place in run.left_out for run in self.runs)


class Folding:
    """Which calls of a program are traced, and for which calls they stand.

    Attributes:
        calls: the calls of the graph.
        folds: the folded calls of each stage.
        like: for each stage the first stage that is equal but for the number of blocks in its runs.

    Args:
        program: what the plan decided.
    """

    def __init__(self, calls: StagedCalls, program: Program) -> None:
        self.calls = calls
        decisions = _Decisions(calls, program)
        bucket_of = {name: i for i, bucket in enumerate(program.zero_buckets) for name in bucket}
        self._in_buckets = [_places_in_buckets(s, bucket_of) for s in calls.stages]
        codes = [decisions.of_stage(stage) for stage in range(len(calls.stages))]
        self.folds = [StageFold(self._runs(*each)) for each in enumerate(codes)]
        first: dict[Hashable, int] = {}
        self.like = [
            first.setdefault(self._key(stage, codes[stage], decisions), stage)
            for stage in range(len(codes))
        ]

    @classmethod
    def of_every_call(cls, calls: StagedCalls) -> Folding:
        """All calls are traced."""
        folding = cls.__new__(cls)
        folding.calls, stages = calls, len(calls.stages)
        folding.folds, folding.like = [StageFold(())] * stages, list(range(stages))
        return folding

    def _runs(self, stage: int, codes: list[int]) -> list[Run]:
        """The runs of equal blocks of a stage; ``codes`` are equal for equal decisions."""
        found, sequence, place = list[Run](), self.calls.stages[stage], 0
        gaps, readers = sequence.gaps, sequence.last_readers
        while place < len(codes):
            gap, end = gaps[place], place
            while gap and gaps[end] == gap and codes[end] == codes[end + gap]:
                end += 1
            start = self._between_buckets(stage, place, gap)
            run = Run(start, gap, (end - start) // gap + 1 if gap else 0)
            inner = readers[run.start + gap : run.end - gap]
            if run.blocks > TRACED_BLOCKS and max(inner) < run.end:
                found.append(run)
                end = run.end
            place = max(end, place + 1)
        return found

    def _between_buckets(self, stage: int, place: int, gap: int) -> int:
        """The first place from ``place`` on where a block of ``gap`` calls begins that reads no
        ZeRO bucket in part; ``place`` where there is none.
        """
        inside = self._in_buckets[stage]
        places = range(place, place + gap)
        return next((p for p in places if p not in inside and p + gap not in inside), place)

    def _key(self, stage: int, codes: list[int], decisions: _Decisions) -> Hashable:
        """Equal for stages that are equal but for the number of blocks in their runs."""
        sequence, fold = self.calls.stages[stage], self.folds[stage]
        rows = list[Hashable]()
        for place, operands in enumerate(sequence.operands):
            if not fold.is_left_out(place):
                read = tuple(
                    (fold.number(o.home), o.number) if o.home >= 0 else o.node for o in operands
                )
                rows.append((codes[place], read))
        sent = tuple(
            (decisions.of(node), fold.number(self.calls.places[source][1]))
            for node in sequence.sent
            for source in node.all_input_nodes
        )
        return tuple(rows), sent, tuple((run.start, run.length) for run in fold.runs)

    def is_traced(self, node: fx.Node) -> bool:
        """Whether a call is traced. Of a stage that another stands for, no call is, but those
        calls are that receive tensors from a traced stage.
        """
        if node not in self.calls.places:
            return True
        stage, place = self.calls.places[node]
        if self.like[stage] == stage:
            return not self.folds[stage].is_left_out(place)
        return self.like[stage - 1] == stage - 1 and node in self.calls.stages[stage - 1].sent

    def traced(self, node: fx.Node) -> fx.Node:
        """The traced node that stands for ``node``."""
        if self.is_traced(node):
            return node
        stage, place = self.calls.places[node]
        like = self.like[stage]
        number = self.folds[stage].number(place)
        return self.calls.stages[like].nodes[self.folds[like].place(number)]

    def block(self, node: fx.Node) -> TracedBlock | None:
        """The block of a traced call; None where it is in no run."""
        at = self.calls.places.get(node)
        return self.folds[at[0]].block(at[1]) if at is not None else None


def _places_in_buckets(sequence: StageSequence, bucket_of: Mapping[str, int]) -> set[int]:
    """The places of calls of a stage between the first and the last that read one ZeRO bucket,
    without the first.
    """
    readers: dict[int, list[int]] = {}
    for place, operands in enumerate(sequence.operands):
        for operand in operands:
            if (bucket := bucket_of.get(operand.node.name)) is not None:
                readers.setdefault(bucket, []).append(place)
    return {p for places in readers.values() for p in range(places[0] + 1, places[-1] + 1)}


class _Decisions:
    """Numbers what a plan decides for each node: equal numbers for equal nodes with equal
    decisions.
    """

    def __init__(self, calls: StagedCalls, program: Program) -> None:
        self._calls = calls
        self._nodes, self._conversions = program.nodes, program.conversions
        # what is recomputed of each node: "" for its result, a layout for a conversion
        self._recomputed: dict[str, tuple[str, ...]] = {}
        for name in program.recomputed:
            node, _, layout = name.partition(" -> ")
            self._recomputed[node] = (*self._recomputed.get(node, ()), layout)
        self._offloaded = frozenset(program.offloaded)
        # of a parameter in a bucket, its number and the number of parameters
        self._place_in_bucket = {
            name: (i, len(bucket))
            for bucket in program.zero_buckets
            for i, name in enumerate(bucket)
        }
        self._numbers: dict[Hashable, int] = {}
        self._plans: dict[int, int] = {}  # by the identity of the NodePlan, which saves hashing it
        self._placeholders: dict[fx.Node, int] = {}

    def of_stage(self, stage: int) -> list[int]:
        """The number of each call of a stage, with what is decided for its inputs."""
        sequence = self._calls.stages[stage]
        return [
            self._number((self.of(node), *self._of_inputs(operands)))
            for node, operands in zip(sequence.nodes, sequence.operands, strict=True)
        ]

    def of(self, node: fx.Node) -> int:
        """The number of a call or a placeholder."""
        name, at = node.name, self._calls.places.get(node)
        kind = self._calls.kinds[node] if at is None else self._calls.stages[at[0]].kinds[at[1]]
        converted = self._conversions.get(name)
        steps = tuple(converted.items()) if converted else ()
        again = self._recomputed.get(name, ())
        bucket, offloaded = self._place_in_bucket.get(name), name in self._offloaded
        return self._number((kind, self._plan(name), steps, again, bucket, offloaded))

    def _of_inputs(self, operands: Sequence[Operand]) -> list[int]:
        inputs = [o.node for o in operands if o.node.op == "placeholder"]
        for node in inputs:
            if node not in self._placeholders:
                self._placeholders[node] = self.of(node)
        return [self._placeholders[node] for node in inputs]

    def _plan(self, name: str) -> int:
        plan = self._nodes[name]
        if id(plan) not in self._plans:
            self._plans[id(plan)] = self._number(plan)
        return self._plans[id(plan)]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
