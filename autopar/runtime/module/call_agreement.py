"""The agreement of all ranks on a call: they make the same call, with the same random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autopar.runtime.agreement.desync import DesyncDetector
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.communication.stand_ins import runs_alone
from autopar.runtime.data.rank_batch import RankBatch
from autopar.runtime.step.program_variants import ProgramVariant

if TYPE_CHECKING:
    from autopar.runtime.step.step_runner import StepRunner


def make_detector(
    mesh: Mesh,
    state: Sequence[str],
    inputs: Sequence[str],
    batch: RankBatch,
    draws: bool,
    meets: bool,
) -> DesyncDetector | None:
    """Compares the calls of all ranks; None if the program runs in one process.

    Arguments: the names of the tensors of the ``state`` and of the ``inputs``; ``batch``, what each
    rank passes; ``draws``, whether the program draws random numbers; ``meets``, whether ranks meet
    in the backward that the user calls.
    """
    if mesh.program_group is None or runs_alone():
        return None
    identity = zlib.crc32(repr([list(state), list(inputs)]).encode())
    return DesyncDetector(mesh, identity, batch.comparison(inputs), always=draws, meets=meets)


def agree_on_call(
    detector: DesyncDetector | None,
    streams: RandomStreams,
    inputs: Sequence[torch.Tensor],
    variant: ProgramVariant,
    training: bool,
    runner: StepRunner,
) -> None:
    """Compares the call with those of the other ranks, and moves the random streams to it.

    Raises :class:`RunError`, on every rank, if the ranks make different calls.
    """
    seed = proposed = streams.propose_seed(training) if variant.draws else None
    if detector is not None:
        mode = 4 * variant.number + 2 * runner.waits + torch.is_grad_enabled()
        trained = runner.trained_parameters()
        seed = detector.check_call(
            inputs, mode, trained, streams.seed or 0, streams.trained, proposed
        )
    if proposed is not None and seed is not None:
        streams.restart(proposed, seed)
    if variant.draws:
        streams.next_step(training)
