"""Conversions compared with their definition on whole tensors, their gradients with the dual
conversions, and both with spmd_types.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from pool import Pools

from autopar.errors import RunError
from autopar.ir.layout import parse_type
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh

SHAPE = (4, 8, 12)
TYPES = ("I", "R", "P", "S0", "S1", "S2")
PAIRS = tuple(itertools.permutations(TYPES, 2))
MESHES = (((2,), 0), ((4,), 0), ((2, 2), 0), ((2, 2), 1))


def split(whole: torch.Tensor, kind: str, n: int, seed: int = 0) -> list[torch.Tensor]:
    """The ranks' parts of ``whole`` by the definition of the types."""
    t = parse_type(kind)
    if t.is_shard:
        return list(whole.chunk(n, t.dim))
    if kind in "IR":
        return [whole.clone() for _ in range(n)]
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(n - 1)]
    return [*parts, whole - sum(parts)]


def join(parts: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The inverse of ``split``; fails where ranks that must agree do not."""
    t = parse_type(kind)
    if t.is_shard:
        return torch.cat(parts, t.dim)
    if kind == "P":
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def whole(name: str, line: int) -> torch.Tensor:
    """The global tensor of one line of ranks along the axis under test."""
    seed = 10 * line + ("x", "grad", "weight").index(name)
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def place(mesh: Mesh, axis: int) -> tuple[int, int]:
    """The number of this rank's line of ranks along ``axis``, and its place in the line."""
    return mesh.index([a for a in range(len(mesh.sizes)) if a != axis]), mesh.coordinate[axis]


def convert_all(sizes: tuple[int, ...], axis: int, pairs: tuple, reference: bool) -> tuple:
    """The local result and the local gradient for each pair, by autopar or by spmd_types."""
    import spmd_types

    mesh = Mesh(sizes, tuple("abc"[: len(sizes)]))
    line, r = place(mesh, axis)
    n = sizes[axis]

    def theirs(text: str) -> object:
        return spmd_types.S(parse_type(text).dim) if text[0] == "S" else getattr(spmd_types, text)

    def convert(x: torch.Tensor, src: str, dst: str) -> torch.Tensor:
        if reference:
            # spmd_types calls functions that torch 2.13 deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            return spmd_types.redistribute(x, mesh.group(axis), src=theirs(src), dst=theirs(dst))
        return redistribute(x, mesh, axis, src, dst)

    results = []
    for src, dst in pairs:
        x = split(whole("x", line), src, n)[r].requires_grad_()
        y = convert(x, src, dst)
        y.backward(split(whole("grad", line), repr(parse_type(dst).dual), n, seed=1)[r])
        results.append((y.detach(), x.grad, y.is_contiguous()))
    return line, r, results


@pytest.mark.parametrize(("sizes", "axis"), MESHES)
def test_value_and_gradient_of_every_pair(ranks: Pools, sizes: tuple[int, ...], axis: int) -> None:
    answers = ranks(torch.Size(sizes).numel()).run(convert_all, sizes, axis, PAIRS, False)
    n = sizes[axis]
    for line in {answer[0] for answer in answers}:
        mine = [
            results
            for _, _, results in sorted((a for a in answers if a[0] == line), key=lambda a: a[1])
        ]
        assert len(mine) == n
        for i, (src, dst) in enumerate(PAIRS):
            value = join([results[i][0] for results in mine], dst)
            torch.testing.assert_close(
                value, whole("x", line), msg=lambda m, p=(src, dst): f"{p}: {m}"
            )
            grad = join([results[i][1] for results in mine], repr(parse_type(src).dual))
            torch.testing.assert_close(
                grad, whole("grad", line), msg=lambda m, p=(src, dst): f"gradient of {p}: {m}"
            )
            assert all(results[i][2] for results in mine)


def test_agrees_with_spmd_types(ranks: Pools) -> None:
    ours = ranks(2).run(convert_all, (2,), 0, PAIRS, False)
    theirs = ranks(2).run(convert_all, (2,), 0, PAIRS, True)
    for (_, _, a), (_, _, b) in zip(ours, theirs, strict=True):
        for pair, (y, grad, _), (y_ref, grad_ref, _) in zip(PAIRS, a, b, strict=True):
            torch.testing.assert_close(y, y_ref, msg=lambda m, p=pair: f"{p}: {m}")
            torch.testing.assert_close(
                grad, grad_ref, msg=lambda m, p=pair: f"gradient of {p}: {m}"
            )


def chains(sizes: tuple[int, ...], axis: int) -> list[tuple[str, str, float, float]]:
    """Computes I -> src -> dst -> loss for every pair; returns the errors of the loss and of the
    gradient.
    """
    mesh = Mesh(sizes, tuple("abc"[: len(sizes)]))
    line, r = place(mesh, axis)
    whole_x, weight = whole("x", line), whole("weight", line)
    loss_type = {"I": "I", "R": "R", "P": "P", "S": "P"}
    errors = []
    for src, dst in PAIRS:
        x = whole_x.clone().requires_grad_()
        y = redistribute(redistribute(x, mesh, axis, "I", src), mesh, axis, src, dst)
        local = split(weight, "R" if dst == "P" else dst, sizes[axis])[r]
        loss = redistribute((y * local).sum(), mesh, axis, loss_type[dst[0]], "I")
        loss.backward()
        assert x.grad is not None
        errors.append(
            (
                src,
                dst,
                abs(loss.item() - (whole_x * weight).sum().item()),
                (x.grad - weight).abs().max().item(),
            )
        )
    return errors


@pytest.mark.parametrize(("sizes", "axis"), MESHES)
def test_gradient_of_a_loss_through_every_pair(
    ranks: Pools, sizes: tuple[int, ...], axis: int
) -> None:
    for errors in ranks(torch.Size(sizes).numel()).run(chains, sizes, axis):
        for src, dst, loss_error, grad_error in errors:
            assert loss_error < 1e-11, (src, dst)
            assert grad_error < 1e-12, (src, dst)


def convert_dtype(dtype: torch.dtype, pairs: list[tuple[str, str]]) -> list[torch.Tensor]:
    mesh = Mesh((2,), ("a",))
    numbers = torch.arange(96).reshape(SHAPE[0], 2, 12).remainder(7).to(dtype)
    results = []
    for src, dst in pairs:
        parts = [numbers, torch.zeros_like(numbers)] if src == "P" else split(numbers, src, 2)
        strided = parts[mesh.coordinate[0]].transpose(0, -1).contiguous().transpose(0, -1)
        results.append(redistribute(strided, mesh, 0, src, dst))
    return results


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ],
)
def test_every_dtype(ranks: Pools, dtype: torch.dtype) -> None:
    pairs = [pair for pair in PAIRS if dtype != torch.bool or "P" not in pair]
    answers = ranks(2).run(convert_dtype, dtype, pairs)
    numbers = torch.arange(96).reshape(SHAPE[0], 2, 12).remainder(7).to(dtype)
    # Under P rank 0 has the numbers, and the other ranks have zeros.
    for i, (_, dst) in enumerate(pairs):
        value = join([answer[i] for answer in answers], dst)
        assert torch.equal(value.to(dtype), numbers), pairs[i]
        assert answers[0][i].dtype == dtype


def scalars_and_empty() -> None:
    mesh = Mesh((2,), ("a",))
    for src, dst, value, expected in (
        ("P", "I", 3.0, 6.0),
        ("P", "R", 3.0, 6.0),
        ("I", "R", 3.0, 3.0),
        ("R", "I", 3.0, 3.0),
    ):
        x = torch.tensor(value, requires_grad=True)
        y = redistribute(x, mesh, 0, src, dst)
        assert y.shape == ()
        assert y.item() == expected
        y.backward()
    for src, dst in PAIRS:
        redistribute(torch.zeros(0, 4, 4), mesh, 0, src, dst)


def test_scalars_and_empty_tensors(ranks: Pools) -> None:
    ranks(2).run(scalars_and_empty)


def second_derivative() -> list[torch.Tensor]:
    mesh = Mesh((2,), ("a",))
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    half = redistribute(w, mesh, 0, "I", "S0")
    loss = redistribute((half**3).sum(), mesh, 0, "P", "I")
    (first,) = torch.autograd.grad(loss, w, create_graph=True)
    first.sum().backward()
    assert w.grad is not None
    return [first.detach(), w.grad]


def test_second_derivative(ranks: Pools) -> None:
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    for first, second in ranks(2).run(second_derivative):
        torch.testing.assert_close(first, 3 * w**2)
        torch.testing.assert_close(second, 6 * w)


def one_rank() -> None:
    mesh = Mesh((1,), ("a",))
    x = torch.ones(3, requires_grad=True)
    for src, dst in PAIRS:
        assert redistribute(x, mesh, 0, src, dst) is x


def test_one_rank_converts_for_nothing(ranks: Pools) -> None:
    ranks(1).run(one_rank)


def refused() -> list[str]:
    mesh = Mesh((2,), ("tensor",))
    messages = []
    for shape, src, dst in (((3, 4), "I", "S0"), ((4,), "P", "S1")):
        with pytest.raises(RunError) as caught:
            redistribute(torch.zeros(shape), mesh, 0, src, dst)
        messages.append(str(caught.value))
    with pytest.raises(RunError) as caught:
        Mesh((3, 2), ("a", "b"))
    return [*messages, str(caught.value)]


def test_errors_name_the_numbers(ranks: Pools) -> None:
    for indivisible, missing, mesh in ranks(2).run(refused):
        assert "dim 0 of shape (3, 4) does not divide by 2 (axis 'tensor')" in indivisible
        assert "P -> S1 of a tensor of shape (4,)" in missing
        assert "(3, 2) has 6 ranks but 2 processes" in mesh


def places() -> tuple:
    mesh = Mesh((2, 2), ("a", "b"))
    both = mesh.axes_group((0, 1))
    assert mesh.axes_group((0, 1)) is both
    return (
        mesh.coordinate,
        mesh.index((0, 1)),
        mesh.index((1, 0)),
        torch.distributed.get_rank(both),
        mesh.count((0, 1)),
        repr(mesh),
    )


def test_places_on_a_mesh(ranks: Pools) -> None:
    for rank, (coordinate, index, swapped, group_rank, count, text) in enumerate(
        ranks(4).run(places)
    ):
        assert coordinate == divmod(rank, 2)
        assert index == swapped == group_rank == rank
        assert count == 4
        assert text == "Mesh(a=2, b=2)"
