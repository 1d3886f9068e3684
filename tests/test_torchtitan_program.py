"""The recorder sees what a program allocates and frees, and on which stream; torchtitan's program
takes what is computed by hand.
"""

from __future__ import annotations

import pytest
import torch
from allocation_recorder import AllocationRecorder
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan_program import record

from autopar.cost_model.caching_allocator import MemoryEvent, simulate_allocator

MIB = 2**20


def test_what_operators_make_is_recorded_with_its_stream() -> None:
    with FakeTensorMode(), AllocationRecorder() as recorder:
        x = torch.empty(100)
        with torch.cpu.stream(torch.cpu.Stream()):
            y = x * 2
        view = x.view(10, 10)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(400)
        del y
        del x, view
        torch.empty(7)
    assert recorder.events == [
        MemoryEvent(1, 400, 0),
        MemoryEvent(2, 400, 1),
        MemoryEvent(1, None),
        MemoryEvent(3, 400, 0),
        MemoryEvent(2, None),
        MemoryEvent(3, None),
        MemoryEvent(4, 28, 0),
        MemoryEvent(4, None),
    ]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_layer_takes_what_is_computed_by_hand(is_compiled: bool) -> None:
    """The peak is in the loss. A layer then has a float32 shard of its 218,112,000 parameters and
    two such tensors of AdamW; its input, attention and query of 16384 × 4096 bfloat16 numbers,
    in eager mode the result of the last product, too; values of a quarter of that; 16384 × 14336
    numbers before the activation; 4 bytes for each row and head of attention.
    """
    one = 16384 * 4096 * 2
    saved = (3 + (not is_compiled) + 1 / 4 + 14336 / 4096) * one + 16384 * 32 * 4
    by_hand = 3 * 4 * 218_112_000 / 8 + saved
    few, more = (simulate_allocator(record(8, is_compiled, layers)).allocated for layers in (2, 3))
    assert more - few == pytest.approx(by_hand, abs=MIB)
