"""The samples of a global batch that each replica passes, by the formula of docs/training.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from autopar.ir.batch_layouts import BatchLayouts
from autopar.ir.layout import I, Layout, S
from autopar.runtime.data.rank_batch import RankBatch


def _batch(sizes: tuple[int, ...], layout: Layout, axes: tuple[int, ...], samples: int) -> Any:
    made = object.__new__(RankBatch)
    made._layouts = BatchLayouts(axes, ((I,) * len(sizes), layout), ())
    made._mesh, made._samples = SimpleNamespace(sizes=sizes), samples
    made.data_size = int(torch.tensor([sizes[axis] for axis in axes]).prod())
    return made


def test_samples_of_a_replica_are_one_part_after_the_other() -> None:
    whole = torch.arange(24).view(12, 2)
    for axes, layout in (((0,), (S(0), I)), ((1,), (I, S(0)))):
        batch = _batch((3, 3), layout, axes, 12)
        for rank, part in enumerate(whole.chunk(3)):
            assert torch.equal(batch.samples_of(whole, [rank]), part)
        assert torch.equal(batch.samples_of(whole, range(3)), whole)


def test_a_slower_axis_that_cuts_the_batch_too_takes_turns() -> None:
    whole, slower, replicas = torch.arange(12), 3, 2
    batch = _batch((slower, replicas), (S(0), S(0)), (1,), 12)
    parts = [whole.unflatten(0, (slower, replicas, -1))[:, i].flatten(0, 1) for i in range(2)]
    for rank, part in enumerate(parts):
        assert torch.equal(batch.samples_of(whole, [rank]), part)
    assert torch.equal(batch.samples_of(whole, [0, 1]), torch.cat(parts))


def test_what_has_no_samples_stays_as_it_is() -> None:
    batch = _batch((2, 2), (S(0), I), (0,), 12)
    for other in (torch.tensor(3.0), torch.arange(5)):
        assert batch.samples_of(other, [0]) is other
    whole = torch.arange(12)
    assert _batch((2, 2), (I, I), (), 0).samples_of(whole, [0]) is whole
