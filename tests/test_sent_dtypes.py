"""Tensors of every dtype, through every kind of collective: compared with the whole tensor, which
every rank has, by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pool import Pools

from autopar.errors import RunError
from autopar.runtime.communication import functional
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.functional import as_message
from autopar.runtime.communication.kernel_collectives import (
    all_gather_stacked,
    all_reduce,
    exchange_with_neighbours,
    start_ring_shift,
)
from autopar.runtime.communication.mesh import Mesh

FLOAT_8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex64, torch.complex128]
SUMMED = [torch.int8, torch.uint8, torch.bfloat16, *COMPLEX]
NOT_SUMMED = [*FLOAT_8, torch.int16, torch.uint16]
MOVED = [*SUMMED, *NOT_SUMMED, torch.bool]


def numbers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor [4, 8] that is no other one read in another order."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 100, (4, 8), generator=generator).double()
    if dtype in COMPLEX:
        return torch.complex(found, found.flip(0)).to(dtype).conj()  # conjugated when it is read
    return (found - 50 if dtype.is_signed else found).to(dtype)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are the same."""
    mine, other = (t.resolve_conj().contiguous() for t in (x, y))
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    return torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def half(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """What rank ``rank`` of two holds of ``x``."""
    return x.narrow(dim, rank * x.shape[dim] // 2, x.shape[dim] // 2)


def moves(dtype: torch.dtype, device: str = "cpu") -> dict[str, bool]:
    """For each way in which tensors only move, whether this rank of two gets the right one."""
    mesh, rank, on_host = Mesh((2,), ("a",), device), dist.get_rank(), numbers(dtype)
    whole = on_host.to(device)
    group, other = mesh.group(0), half(whole, 0, 1 - dist.get_rank())
    rows, columns = half(whole, 0, rank), half(whole, 1, rank)
    zigzag = on_host[:, [2, 3, 4, 5] if rank else [0, 1, 6, 7]].to(device)
    conversions = {
        ("I", "S1"): (whole, columns),
        ("S0", "R"): (rows, whole),
        ("S1", "I"): (columns, whole),
        ("S0", "S1"): (rows, columns),
        ("S1", "Z1"): (columns, zigzag),
        ("Z1", "I"): (zigzag, whole),
    }
    found = {
        f"{src} to {dst}": same(redistribute(x, mesh, 0, src, dst), expected)
        for (src, dst), (x, expected) in conversions.items()
    }
    found["ring"] = same(start_ring_shift(rows, group.group_name, 2, rank)(), other)
    found["stacked"] = same(all_gather_stacked(rows, group), whole.unflatten(0, (2, 2)))
    before, after = exchange_with_neighbours(rows[:1], rows[1:], group, rank)
    found["neighbour"] = same(before, other[1:]) if rank else same(after, other[:1])
    sent = (whole if rank == 0 else torch.zeros_like(whole)).resolve_conj().contiguous()
    received = functional.wait_tensor(functional.broadcast_(sent, 0, group.group_name))
    found["broadcast"] = same(received, whole) and same(sent, whole)
    buffer = torch.empty_like(whole, memory_format=torch.contiguous_format)
    message = dist.P2POp(dist.irecv, as_message(buffer), 0) if rank else None
    for work in dist.batch_isend_irecv([message or dist.P2POp(dist.isend, as_message(whole), 1)]):
        work.wait()
    found["message"] = rank == 0 or same(buffer, whole)
    return found


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_what_moves_arrives(ranks: Pools, dtype: torch.dtype) -> None:
    for found in ranks(2).run(moves, dtype):
        assert len(found) == 11
        assert all(found.values()), found


def sums(dtype: torch.dtype, device: str = "cpu") -> dict[str, bool]:
    """For each way of summing, whether this rank of two gets the right sum."""
    mesh, rank = Mesh((2,), ("a",), device), dist.get_rank()
    both = [numbers(dtype, seed).to(device) for seed in (0, 1)]
    mine, total = both[rank], both[0] + both[1]
    flat = mine.resolve_conj().clone()
    in_place = functional.all_reduce_(flat, "sum", mesh.group(0).group_name)
    return {
        "all-reduce": same(redistribute(mine, mesh, 0, "P", "I"), total),
        "reduce-scatter": same(redistribute(mine, mesh, 0, "P", "S1"), half(total, 1, rank)),
        "of a kernel": same(all_reduce(mine, mesh.group(0)), total),
        "in place": same(functional.wait_tensor(in_place), total) and same(flat, total),
    }


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_sums(ranks: Pools, dtype: torch.dtype) -> None:
    for found in ranks(2).run(sums, dtype):
        assert all(found.values()), found


def refusals(dtype: torch.dtype, op: str) -> None:
    mesh, x = Mesh((2,), ("a",), "cpu"), numbers(dtype)
    calls: list[Callable[[], object]] = [lambda: all_reduce(x, mesh.group(0), op)]
    if op == "sum":
        calls += [partial(redistribute, x, mesh, 0, "P", dst) for dst in ("I", "S0")]
    for call in calls:
        with pytest.raises(RunError, match=rf"a {op} of {dtype} over ranks, .*\(4, 8\): .*convert"):
            call()


@pytest.mark.parametrize(
    ("dtype", "op"), [*((d, "sum") for d in NOT_SUMMED), *((d, "max") for d in COMPLEX)], ids=str
)
def test_what_no_backend_adds_is_refused(ranks: Pools, dtype: torch.dtype, op: str) -> None:
    ranks(2).run(refusals, dtype, op)


def gradients() -> dict[str, bool]:
    """Of a complex tensor that is gathered, and of one that is summed, as on one device."""
    mesh, rank = Mesh((2,), ("a",), "cpu"), dist.get_rank()
    whole, weight = numbers(torch.complex128), numbers(torch.complex128, seed=1)
    x = whole.resolve_conj().clone().requires_grad_()
    (expected,) = torch.autograd.grad((x * weight).abs().sum(), x)
    found = {}
    for dim in (0, 1):
        local = half(whole, dim, rank).resolve_conj().clone().requires_grad_()
        gathered = redistribute(local, mesh, 0, f"S{dim}", "I")
        (gradient,) = torch.autograd.grad((gathered * weight).abs().sum(), local)
        found[f"gathered {dim}"] = torch.equal(gradient, half(expected, dim, rank))
    used = redistribute(x, mesh, 0, "I", "R")
    share = (half(used, 0, rank) * half(weight, 0, rank)).abs().sum()
    (gradient,) = torch.autograd.grad(redistribute(share, mesh, 0, "P", "I"), x)
    found["summed"] = torch.equal(gradient, expected)
    return found


def test_gradients_of_complex_tensors(ranks: Pools) -> None:
    for found in ranks(2).run(gradients):
        assert all(found.values()), found
