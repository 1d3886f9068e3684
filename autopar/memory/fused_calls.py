"""The calls of a program whose compiler fuses chains of pointwise operators and reductions.

A compiler such as inductor computes a chain in one kernel, and a result that only this chain reads
never has memory. The backward computes such a result again where it reads it, from the tensors that
the chain read; the compiler chooses which of these are saved by a minimal cut (He and Yu, MLSys
2023). This file chooses like it, tensor by tensor in the order of the program, and so may keep a
few bytes more or less than the minimal cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch.fx as fx

from autopar.ir.model_blocks import number_blocks
from autopar.memory.folding import Folding
from autopar.memory.traced_call import GradientSlot, TracedCall, TracedStorage


def fuse_calls(calls: Sequence[TracedCall], lasting: Collection[TracedStorage]) -> None:
    """Takes the memory from the results that only their own chain reads, and lets backwards read
    the tensors that these are computed from.

    Args:
        calls: the calls of a program that recomputes none, in its order. They are changed. Those of
            one ``part`` are compiled together.
        lasting: storages that stages send or the program returns.
    """
    _Fusion(calls, lasting).run()


def divide_into_blocks(calls: Iterable[TracedCall], graph: fx.Graph, folding: Folding) -> None:
    """Notes the part of each traced call of a program on several ranks, where each block is
    compiled alone. ``graph`` has a node for each call but conversions, which no kernel is fused
    with.

    A traced block may reach into two parts. Its part in the next traced block keeps its number, so
    blocks that are not traced have none.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    parts = dict[str, int]()
    for node, number in number_blocks(nodes).items():
        at = folding.calls.places.get(node)
        left_out = folding.folds[at[0]].blocks_left_out(at[1]) if at is not None else 0
        parts[node.name] = number and number - left_out
    for call in calls:
        call.part = parts.get(call.name, 0)


class _Fusion:
    def __init__(self, calls: Sequence[TracedCall], lasting: Collection[TracedStorage]) -> None:
        self._calls = calls
        for call in calls:
            if call.wide:
                call.internal -= call.wide
                call.saved = [*dict.fromkeys([*call.saved, *call.reads])]
        self._depth = forward_depths(calls)
        readers = defaultdict[TracedStorage, list[TracedCall]](list)
        for call in calls:
            for storage in call.reads if not call.is_view else ():
                readers[storage].append(call)
        self._chained = {  # the storages that only their own chain reads
            storage
            for call in calls
            if call.fuses
            for storage in call.made
            if storage not in lasting
            and readers[storage]
            and all(self._are_chained(call, reader) for reader in readers[storage])
        }
        self._kept = {
            storage
            for call in calls
            for storage in call.saved
            if storage not in self._chained
            and (not call.fuses_back or storage.call.part != call.part)
        }

    def run(self) -> None:
        for call in self._calls:
            if call.fuses_back:
                for storage in call.saved:
                    self._choose(storage)
        for call in self._calls:
            call.saved = list(self._kept_sources(call.saved))
        for storage in self._chained - self._kept:
            storage.nbytes = 0
        for call in self._calls:
            if call.fuses:
                call.footprint = call.footprint._replace(forward=call.made_bytes)

    def _are_chained(self, call: TracedCall, reader: TracedCall) -> bool:
        """Whether one kernel computes a call and a reader of the result."""
        depths = self._depth[call], self._depth[reader]
        return call.fuses and reader.fuses and depths[0] == depths[1] and call.part == reader.part

    def _choose(self, storage: TracedStorage) -> None:
        """Saves a storage that a backward reads, or, if that takes less memory, the storages that
        it is computed from.
        """
        if storage in self._kept:
            return
        sources = self._sources([storage])
        more = sum(s.nbytes for s in sources if s not in self._kept)
        is_less = more <= storage.nbytes if storage in self._chained else more < storage.nbytes
        self._kept |= sources if is_less else {storage}

    def _sources(self, storages: Iterable[TracedStorage]) -> set[TracedStorage]:
        """The storages with memory from which chains compute ``storages``."""
        found, seen, rest = set[TracedStorage](), set[TracedStorage](), list(storages)
        while rest:
            storage = rest.pop()
            call = storage.call
            if not call.may_repeat or storage in self._kept:
                found.add(storage)
                continue
            for source in call.reads:
                if source in seen:
                    continue
                seen.add(source)
                if source in self._chained or source in self._kept:
                    rest.append(source)
                else:
                    found.add(source)
        return found

    def _kept_sources(self, storages: Iterable[TracedStorage]) -> dict[TracedStorage, None]:
        """The storages that are saved from which chains compute ``storages``."""
        found, seen, rest = dict[TracedStorage, None](), set[TracedStorage](), list(storages)
        while rest:
            storage = rest.pop()
            if storage in seen:
                continue
            seen.add(storage)
            if storage in self._kept or not storage.call.may_repeat:
                found[storage] = None
            else:
                rest += storage.call.reads
        return found


def forward_depths(calls: Sequence[TracedCall]) -> dict[TracedCall, int]:
    """For each call the most calls that do not fuse on a path to it. Fused calls of one depth may
    share a kernel, since no other kernel runs between them.
    """
    found: dict[TracedCall, int] = {}
    for call in calls:
        before = (found.get(storage.call, 0) for storage in call.reads)
        found[call] = max(before, default=0) + (not (call.fuses or call.is_view))
    return found


def backward_depths(calls: Sequence[TracedCall]) -> dict[TracedCall, int]:
    """The same for the backward, in which a call follows the calls that read its results."""
    found: dict[TracedCall, int] = {}
    deepest: dict[GradientSlot, int] = {}
    for call in reversed(calls):
        before = (deepest.get(slot, 0) for slot in call.result_slots)
        found[call] = depth = max(before, default=0) + (not call.fuses_back)
        for slot in call.operand_slots:
            if slot is not None:
                deepest[slot] = max(deepest.get(slot, 0), depth)
    return found
