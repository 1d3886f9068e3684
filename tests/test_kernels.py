"""Kernels on 1, 2 and 4 ranks compared with torch on one device, in float64: values and all
gradients.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import SIZES, Tensors, close, compare, convert, draw, make_mesh, run
from pool import Pools

from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.kernels import graph_kernels


def batch_norm(
    sizes: tuple[int, ...], shape: tuple[int, ...], dim: int, affine: bool, training: bool
) -> None:
    mesh, axes = make_mesh(sizes)
    stats = [(draw(shape[1], seed=7), draw(shape[1], seed=8).abs()) for _ in range(2)]

    def split(t: Tensors) -> torch.Tensor:
        x = convert(t["x"], mesh, axes, "I", f"S{dim}")
        weight, bias = (
            None if t[k] is None else convert(t[k], mesh, axes, "I", "R")
            for k in ("weight", "bias")
        )
        return convert(
            graph_kernels.sync_batch_norm(
                x, weight, bias, *stats[0], training, 0.3, 1e-5, mesh, axes
            ),
            mesh,
            axes,
            f"S{dim}",
            "I",
        )

    weight, bias = (draw(shape[1], seed=seed) if affine else None for seed in (1, 2))
    tensors = {"x": draw(*shape) * 3 + 50, "weight": weight, "bias": bias}
    compare(
        split,
        lambda t: F.batch_norm(t["x"], *stats[1], t["weight"], t["bias"], training, 0.3, 1e-5),
        tensors,
    )
    for ours, theirs in zip(*stats, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("shape", "dim"), [((8, 3), 0), ((4, 3, 4, 5), 0), ((2, 3, 4, 5), 2)])
@pytest.mark.parametrize(("affine", "training"), [(True, True), (False, True), (True, False)])
def test_sync_batch_norm(
    ranks: Pools,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    dim: int,
    affine: bool,
    training: bool,
) -> None:
    run(ranks, sizes, batch_norm, shape, dim, affine, training)


def layer_norm(sizes: tuple[int, ...], dims: int, affine: tuple[bool, bool]) -> None:
    mesh, axes = make_mesh(sizes)
    x = draw(2, 3, 8) * 3 + 50
    shape = x.shape[-dims:]

    def split(t: Tensors) -> torch.Tensor:
        local = convert(t["x"], mesh, axes, "I", "S2")
        weight, bias = (
            None if t[k] is None else convert(t[k], mesh, axes, "I", f"S{dims - 1}")
            for k in ("weight", "bias")
        )
        return convert(
            graph_kernels.layer_norm_features(local, dims, weight, bias, 1e-5, mesh, axes),
            mesh,
            axes,
            "S2",
            "I",
        )

    tensors = {
        k: draw(*shape, seed=seed) if given else None
        for k, seed, given in zip(("weight", "bias"), (1, 2), affine, strict=True)
    }
    compare(
        split,
        lambda t: F.layer_norm(t["x"], shape, t["weight"], t["bias"], 1e-5),
        {"x": x, **tensors},
    )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
def test_layer_norm_features(
    ranks: Pools, sizes: tuple[int, ...], dims: int, affine: tuple[bool, bool]
) -> None:
    run(ranks, sizes, layer_norm, dims, affine)


def halves_keep_their_dtype(sizes: tuple[int, ...]) -> None:
    mesh, axes = make_mesh(sizes)
    x, weight = draw(4, 8).bfloat16().requires_grad_(), draw(4, seed=1).float().requires_grad_()
    y = graph_kernels.layer_norm_features(x[:, :4], 1, weight, None, 1e-5, mesh, axes)
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def test_normalisation_keeps_dtypes(ranks: Pools) -> None:
    run(ranks, (2,), halves_keep_their_dtype)


def mean(sizes: tuple[int, ...], dims: tuple[int, ...] | None, keepdim: bool) -> None:
    mesh, axes = make_mesh(sizes)
    x = draw(3, 4, 5)
    count = x.numel() if not dims else torch.Size(x.shape[d] for d in dims).numel()

    def split(t: Tensors) -> torch.Tensor:
        part = graph_kernels.partial_mean(
            convert(t["x"], mesh, axes, "I", "S1"), dims, keepdim, count
        )
        return convert(part, mesh, axes, "P", "I")

    compare(split, lambda t: t["x"].mean(dims, keepdim), {"x": x})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("dims", "keepdim"), [(None, False), ((1,), True), ((-2, 2), False), ((0, 1, 2), True)]
)
def test_mean_split(
    ranks: Pools, sizes: tuple[int, ...], dims: tuple[int, ...] | None, keepdim: bool
) -> None:
    run(ranks, sizes, mean, dims, keepdim)


def draws(sizes: tuple[int, ...], axes: tuple[int, ...], step: int) -> tuple:
    mesh, _ = make_mesh(sizes)
    for _ in range(step):
        mesh.random_streams.next_step()
    torch.manual_seed(torch.distributed.get_rank())
    expected_after = torch.rand(
        3, generator=torch.Generator().manual_seed(torch.distributed.get_rank())
    )
    x = torch.ones(64)
    masks = [graph_kernels.dropout(x, 0.5, True, mesh, node, axes) for node in (0, 1, 0)]
    q, k, v = draw(3, 1, 2, 8, 4).unbind(0)
    attended = [
        graph_kernels.attention(q, k, v, None, 0.5, True, None, False, mesh, node, axes)
        for node in (0, 1, 0)
    ]
    assert torch.equal(torch.rand(3), expected_after)  # the user's stream is untouched
    assert torch.equal(graph_kernels.dropout(x, 0.5, False, mesh, 0, axes), x)
    plain = graph_kernels.attention(q, k, v, None, 0.0, True, 0.7, False, mesh, 0, axes)
    close(plain, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7))
    return masks, attended


def test_random_numbers_follow_the_layout(ranks: Pools) -> None:
    for kind in (0, 1):
        first, second = (run(ranks, (2, 2), draws, (1,), step) for step in (0, 1))
        for node_0, node_1, again in (answer[kind] for answer in first):
            assert torch.equal(node_0, again)
            assert not torch.equal(node_0, node_1)
        a, b, c, d = (answer[kind][0] for answer in first)
        assert torch.equal(a, c)  # alike along axis 0, which does not cut the tensor
        assert torch.equal(b, d)
        assert not torch.equal(a, b)
        assert not torch.equal(a, second[0][kind][0])


def dropped(sizes: tuple[int, ...]) -> None:
    mesh, axes = make_mesh(sizes)
    parts = draw(4, 8, 3)
    mine = parts[torch.distributed.get_rank()]
    after = convert(graph_kernels.dropout(mine, 0.5, True, mesh, 0, ()), mesh, axes, "P", "I")
    close(after, graph_kernels.dropout(parts.sum(0), 0.5, True, mesh, 0, ()))


def test_a_pending_sum_is_dropped_alike(ranks: Pools) -> None:
    run(ranks, (2, 2), dropped)


def test_streams_are_functions_of_their_key() -> None:
    random_streams = RandomStreams(seed=3)
    keys = set()
    for step, microbatch, node, coordinate in itertools.product(range(3), repeat=4):
        random_streams.step, random_streams.microbatch = step, microbatch
        keys.add(random_streams.draw_seed(node, coordinate))
    assert len(keys) == 81
    assert RandomStreams(seed=4).draw_seed(0, 0) not in keys
