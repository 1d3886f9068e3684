"""Which parameter of another block, or of another stage, a parameter stands for."""

from __future__ import annotations

from typing import NamedTuple

from autopar.memory.folding import LIKE_OTHERS, TRACED_BLOCKS, Folding, StageFold, TracedBlock


class _Place(NamedTuple):
    """The first read of a parameter in the calls of a traced stage.

    Attributes:
        block: the block of the reader.
        call: the number of the reader: in its block, or else in the folded stage.
        operand: the operand's number.
    """

    block: TracedBlock | None
    call: int
    operand: int


class ParameterPlaces:
    """The parameters and buffers that a traced stage reads first, by their place."""

    def __init__(self, folding: Folding, stage: int) -> None:
        self._folding, self._names = folding, folding.calls.names
        self._places: dict[str, _Place] = {}
        fold = folding.folds[stage]
        for place, operands in enumerate(folding.calls.stages[stage].operands):
            if fold.is_left_out(place):
                continue
            for number, operand in enumerate(operands):
                is_first = (operand.home, operand.number) == (place, number)
                if is_first and operand.node in self._names:
                    self._places[self._names[operand.node]] = _place(fold, place, number)

    def seen_from(self, name: str, block: TracedBlock) -> tuple[int, ...] | str:
        """The place of a parameter seen from a block of the traced stage; its name where it is in
        no block of the run.
        """
        found = self._places.get(name)
        if found is None or found.block is None or found.block.run != block.run:
            return name
        return found.block.number - block.number, found.call, found.operand

    def names(self, name: str, stage: int) -> list[str]:
        """The parameters for which ``name`` stands in a stage for which the traced stage stands."""
        found = self._places.get(name)
        if found is None or found.block is None:
            return [self.name(name, stage, None, 0)]
        count = self._folding.folds[stage].runs[found.block.run].blocks
        numbers = [found.block.number]
        if numbers == [LIKE_OTHERS]:
            numbers = list(range(LIKE_OTHERS, count - 1))
        elif numbers == [TRACED_BLOCKS - 1]:
            numbers = [count - 1]
        return [self.name(name, stage, found.block, number) for number in numbers]

    def name(self, name: str, stage: int, traced: TracedBlock | None, block: int) -> str:
        """The parameter at the place of ``name`` in a stage that the traced stage stands for.

        Args:
            traced, block: the traced block that ``name`` was met in, and the number of the block
                in its run for which that block stands.
        """
        found, fold = self._places.get(name), self._folding.folds[stage]
        if found is None:
            return name
        if found.block is None:
            place = fold.place(found.call)
        else:
            run = fold.runs[found.block.run]
            number = found.block.number
            if traced is not None and traced.run == found.block.run:
                number += block - traced.number
            elif number == TRACED_BLOCKS - 1:
                number = run.blocks - 1
            place = run.start + number * run.length + found.call
        operand = self._folding.calls.stages[stage].operands[place][found.operand]
        return self._names[operand.node]


def _place(fold: StageFold, place: int, operand: int) -> _Place:
    block = fold.block(place)
    if block is None:
        return _Place(None, fold.number(place), operand)
    run = fold.runs[block.run]
    return _Place(block, (place - run.start) % run.length, operand)
