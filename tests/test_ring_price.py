"""What ring attention sends, its price, what its tiles hold, and what it gives to kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_checks import draw, make_mesh
from pool import Pools
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import RunError
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.runtime.kernels import ring_attention
from autopar.runtime.kernels.causal_tiles import SequenceSplit, causal_tiles
from autopar.runtime.kernels.fused_attention import (
    AttentionSettings,
    block_attention,
    block_attention_backward,
)

BATCH, WIDTH = 2, 6


class _Received(TorchDispatchMode):
    """Counts the bytes that this rank receives, and lists all other communication."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.others = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "_c10d_functional::all_to_all_single":
            assert sum(n > 0 for n in args[1]) == 1
            self.nbytes += sum(args[1]) * args[0].dtype.itemsize
        elif "c10d" in name and not name.endswith("wait_tensor"):
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def _count(dtype: torch.dtype, zigzag: bool) -> None:
    world = torch.distributed.get_world_size()
    mesh, _ = make_mesh((world,))
    q, k, v = (draw(BATCH, h, 4, w).to(dtype).requires_grad_() for h, w in ((4, 6), (2, 6), (2, 6)))
    block = k.numel() * dtype.itemsize
    with _Received() as received:
        x = ring_attention.ring_attention(q, k, v, None, 0.0, True, None, mesh, 0, (0,), 0, zigzag)
        assert received.nbytes == 2 * (world - 1) * block
        x.sum().backward()
    assert received.nbytes == 6 * (world - 1) * block
    assert not received.others


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_receives_every_other_block_once_and_three_times_a_step(
    ranks: Pools, world: int, zigzag: bool
) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        ranks(world).run(_count, dtype, zigzag)


def _priced(ranks: int, zigzag: bool, mask: bool = False, dropout: float = 0.0) -> OperatorTrace:
    q, k, v = (contiguous_spec((BATCH, h, 64, 8), torch.float32, True) for h in (4, 2, 2))
    added = contiguous_spec((64, 64 * ranks), torch.float32, True) if mask else None
    mesh = FakeMesh((2, ranks))
    return OperatorTracer("cpu").trace(
        ring_attention.ring_attention,
        [q, k, v, added, dropout, not mask, None, mesh, 0, (0, 1), 1, zigzag],
        {},
    )


@pytest.mark.parametrize(("ranks", "zigzag"), [(1, False), (2, True), (4, False), (4, True)])
def test_is_priced_without_data(ranks: int, zigzag: bool) -> None:
    answer = _priced(ranks, zigzag)
    for launches, shifts in ((answer.forward, ranks - 1), (answer.backward, 2 * (ranks - 1))):
        sent = [launch.operator for launch in launches if launch.sends]
        assert (
            sent.count("_c10d_functional::all_to_all_single")
            == sent.count("_c10d_functional::wait_tensor")
            == shifts
        )
        assert len(sent) == 2 * shifts
        # Blocks that are masked as a whole are not computed.
        assert sum(launch.kind == "attention" for launch in launches) == ranks
    # The price is that of the last rank. With zigzag it attends to half of each block, and without
    # to all of the blocks before its own.
    square, part = 2.0 * BATCH * 4 * 64 * 64 * 2 * 8, 0.5 if zigzag else 1.0
    (diagonal,) = [
        launch.flops for launch in _priced(1, False).forward if launch.kind == "attention"
    ]
    assert sum(launch.flops for launch in answer.forward) == diagonal + (ranks - 1) * part * square
    assert answer.operands == {0, 1, 2}
    assert answer.internal == (BATCH * 4 * 64 * 4,)  # one number for each row


def test_all_it_can_do_is_priced() -> None:
    for answer in (_priced(2, True, mask=True), _priced(2, False, dropout=0.1)):
        assert any(launch.kind == "matmul" for launch in answer.backward)
        assert sum(g is not None for g in answer.footprint.gradients) >= 3


@pytest.mark.parametrize("zigzag", [False, True])
def test_tiles_hold_what_is_seen_and_no_more(zigzag: bool) -> None:
    for ranks, length, others in itertools.product((1, 2, 3, 5), (2, 4, 6), (2, 4, 6)):
        cut = SequenceSplit(ranks, zigzag)
        for rank, source in itertools.product(range(ranks), repeat=2):
            here, there = (
                ring_attention.sequence_positions(r, ranks, n, zigzag)
                for r, n in ((rank, length), (source, others))
            )
            seen, found = here[:, None] >= there, torch.zeros(length, others)
            made = causal_tiles(cut, rank, length, source, others)
            for rows, keys, causal in made:
                part = torch.ones_like(found[rows, keys])
                assert not causal or part.shape[0] == part.shape[1]
                found[rows, keys] += part.tril() if causal else part
            assert torch.equal(found, seen.float())
            assert len(made) <= 1 or length != others


def test_two_pieces_need_an_even_length() -> None:
    q = torch.empty(1, 1, 3, 4, device="meta")
    with pytest.raises(RunError, match="its 3 queries and 3 keys must be even"):
        ring_attention.ring_attention(
            q, q, q, None, 0.0, True, None, FakeMesh((2,)), 0, (0,), 0, True
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_cuda_take_what_they_are_given(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (
        torch.empty(BATCH, h, n, 16, dtype=dtype, device="meta")
        for h, n in ((4, 40), (2, 24), (2, 24))
    )
    bias = torch.empty(BATCH, 1, 40, 24, device="meta") if masked else None
    look = AttentionSettings(0.25, "cuda", False, bias)
    out, norm = block_attention(q, k, v, look)
    assert (out.shape, out.dtype, norm.shape, norm.dtype) == (
        q.shape,
        dtype,
        q.shape[:-1],
        torch.float32,
    )
    for given, gradient in zip(
        (q, k, v), block_attention_backward(out, q, k, v, out, norm, look), strict=True
    ):
        assert (gradient.shape, gradient.dtype) == (given.shape, dtype)
