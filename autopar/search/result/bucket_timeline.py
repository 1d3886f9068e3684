"""What computation hides of the collectives of parameters once a step.

A rank gathers buckets of parameters in the order of use, beside the first forward; a bucket is
needed when its first parameter is used. It sums buckets of gradients in the reverse order, beside
the last backward; a bucket is complete when the gradient of that same parameter is. So in both
phases a bucket has beside it what is computed before its first parameter, in the order of the
forward. One collective runs after the other.

Each parameter is taken to stand for computation in proportion to its elements; a table that is
looked up stands for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import NamedTuple

from autopar.ir.parameter_collectives import BUCKET_BYTES
from autopar.search.pricing.step_prices import Traffic


class UsedParameter(NamedTuple):
    """A parameter, of which each of ``blocks`` equal blocks has one.

    Attributes:
        nbytes: that each kind of collectives carries of it.
        work: its part of the computation, in any unit.
    """

    blocks: int
    nbytes: Mapping[Traffic, float]
    work: float


class Bucket(NamedTuple):
    """The parameters of one collective.

    Attributes:
        beside: the part of the phase's computation before the first of them is used, 0 to 1.
        nbytes: of all of them.
    """

    beside: float
    nbytes: float


def each_parameter(parameters: Sequence[UsedParameter]) -> Iterator[UsedParameter]:
    """Each parameter of each block, in the order of use. Those of equal blocks come one after the
    other, and have the same number of blocks.
    """
    for blocks, members in groupby(parameters, key=lambda parameter: parameter.blocks):
        yield from chain.from_iterable(repeat(tuple(members), blocks))


def buckets_of(parameters: Iterable[UsedParameter], traffic: Traffic) -> list[Bucket]:
    """The buckets of one kind of collectives, of all parameters, which come in the order of use."""
    works, total = list[tuple[float, float]](), 0.0  # bytes, and the work before
    for parameter in parameters:
        if nbytes := parameter.nbytes.get(traffic, 0.0):
            works.append((nbytes, total))
        total += parameter.work
    buckets = list[Bucket]()
    for nbytes, before in reversed(works) if traffic.phase == "backward" else works:
        beside = before / total if total else 0.0
        last = buckets[-1] if buckets else Bucket(0.0, BUCKET_BYTES)
        if last.nbytes + nbytes > BUCKET_BYTES:
            buckets.append(Bucket(beside, nbytes))
        else:
            buckets[-1] = Bucket(min(last.beside, beside), last.nbytes + nbytes)
    return buckets


def exposed_seconds(taken: Iterable[tuple[float, float]], computation: float) -> float:
    """The seconds that a rank waits in a phase, of ``computation`` seconds: ``taken`` has the part
    of the computation beside each collective, and the seconds of the collective.
    """
    exposed = seconds = 0.0
    for beside, each in sorted(taken):
        seconds += each
        exposed = max(exposed, seconds - computation * beside)
    return exposed
