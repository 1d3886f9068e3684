"""Kernels on 1, 2 and 4 ranks compared with torch on one device, in float64: values and all
gradients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pools

from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.kernels import graph_kernels

SIZES = ((1,), (2,), (4,), (2, 2))
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
Tensors = dict[str, "torch.Tensor | None"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_mesh(sizes: tuple[int, ...]) -> tuple[Mesh, tuple[int, ...]]:
    return Mesh(sizes, tuple("abc"[: len(sizes)])), tuple(range(len(sizes)))


def convert(x: torch.Tensor, mesh: Mesh, axes: tuple[int, ...], src: str, dst: str) -> torch.Tensor:
    """Converts ``x`` along all ``axes``. The later axis is cut last and joined first."""
    for axis in axes if dst[0] == "S" else reversed(axes):
        x = redistribute(x, mesh, axis, src, dst)
    return x


def compare(
    split: Callable[[Tensors], torch.Tensor],
    whole: Callable[[Tensors], torch.Tensor],
    tensors: Tensors,
) -> None:
    """Compares ``split`` on all ranks with ``whole`` on one: the values, and the gradients of a
    random weighting of the values.
    """
    results = []
    for function in (split, whole):
        leaves = {
            k: None if t is None else t.clone().requires_grad_(t.is_floating_point())
            for k, t in tensors.items()
        }
        y = function(leaves)
        (y * draw(*y.shape, seed=99)).sum().backward()
        results.append(
            (
                y.detach(),
                {k: t.grad for k, t in leaves.items() if t is not None and t.requires_grad},
            )
        )
    close(results[0][0], results[1][0])
    for name, grad in results[1][1].items():
        close(results[0][1][name], grad, msg=lambda m, name=name: f"gradient of {name}: {m}")


def run(ranks: Pools, sizes: tuple[int, ...], fn: Callable[..., Any], *args: Any) -> list[Any]:
    return ranks(torch.Size(sizes).numel()).run(fn, sizes, *args)


LOSSES = tuple(itertools.product((-100, 3), (0.0, 0.1), (False, True)))


def targets(shape: tuple[int, ...], vocabulary: int, ignore: int) -> torch.Tensor:
    target = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(5))
    target[0, :2] = ignore
    return target


@pytest.mark.parametrize(("ignore", "smoothing", "weighted"), LOSSES)
def test_cross_entropy_is_a_sum_over_a_count(ignore: int, smoothing: float, weighted: bool) -> None:
    logits, target = draw(3, 4, 8), targets((3, 4), 8, ignore)
    weight = draw(8, seed=1).abs() if weighted else None
    total = graph_kernels.cross_entropy(logits, target, weight, ignore, smoothing)
    count = graph_kernels.target_count(target, weight, ignore, dtype=torch.float64)
    flat = logits.flatten(0, 1), target.flatten(), weight
    close(
        total,
        F.cross_entropy(*flat, ignore_index=ignore, label_smoothing=smoothing, reduction="sum"),
    )
    close(total / count, F.cross_entropy(*flat, ignore_index=ignore, label_smoothing=smoothing))


def test_cross_entropy_without_targets_is_nan_as_in_torch() -> None:
    logits, target = draw(4, 8), torch.full((4,), -100)
    mean = graph_kernels.cross_entropy(logits, target) / graph_kernels.target_count(target)
    assert mean.isnan()
    assert F.cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cross_entropy_of_many_tokens_does_not_overflow(dtype: torch.dtype) -> None:
    logits, target = (
        torch.zeros(40000, 16, dtype=dtype, requires_grad=True),
        torch.zeros(40000, dtype=torch.int64),
    )
    total = graph_kernels.cross_entropy(logits, target)
    torch.testing.assert_close(
        total / graph_kernels.target_count(target), torch.tensor(16.0).log(), rtol=1e-2, atol=0
    )
    total.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


def vocabulary_loss(sizes: tuple[int, ...], ignore: int, smoothing: float, weighted: bool) -> None:
    mesh, axes = make_mesh(sizes)
    target = targets((3, 4), 8, ignore)
    weight = draw(8, seed=1).abs() if weighted else None

    def split(t: Tensors) -> torch.Tensor:
        local = convert(t["logits"], mesh, axes, "I", "S2")
        return graph_kernels.cross_entropy_vocabulary(
            local, target, weight, ignore, smoothing, mesh, axes
        )

    compare(
        split,
        lambda t: graph_kernels.cross_entropy(t["logits"], target, weight, ignore, smoothing),
        {"logits": draw(3, 4, 8) * 20},
    )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("ignore", "smoothing", "weighted"), LOSSES)
def test_cross_entropy_vocabulary(
    ranks: Pools, sizes: tuple[int, ...], ignore: int, smoothing: float, weighted: bool
) -> None:
    run(ranks, sizes, vocabulary_loss, ignore, smoothing, weighted)


def vocabulary_loss_halves(sizes: tuple[int, ...]) -> None:
    mesh, axes = make_mesh(sizes)
    logits, target = (draw(64, 8) * 300 + 1000).bfloat16(), targets((1, 64), 8, -100)[0]
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact, target, reduction="sum").backward()
    logits.requires_grad_()
    loss = graph_kernels.cross_entropy_vocabulary(
        convert(logits, mesh, axes, "I", "S1"), target, None, -100, 0.0, mesh, axes
    )
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(exact, target, reduction="sum"), rtol=1e-5, atol=0
    )
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-2)


def test_cross_entropy_vocabulary_in_bfloat16_with_large_logits(ranks: Pools) -> None:
    run(ranks, (2,), vocabulary_loss_halves)


def out_of_range(sizes: tuple[int, ...]) -> None:
    mesh, axes = make_mesh(sizes)
    with pytest.raises(RuntimeError, match=r"target out of range: must be in \[0, 8\)"):
        graph_kernels.cross_entropy_vocabulary(
            draw(2, 4), torch.tensor([8, 0]), None, -100, 0.0, mesh, axes
        )
    with pytest.raises(RuntimeError, match=r"index out of range: must be in \[0, 8\)"):
        graph_kernels.embedding_vocabulary(
            draw(4, 2), torch.tensor([-1, 0]), None, False, False, mesh, axes
        )


def test_an_index_that_no_rank_holds_is_an_error(ranks: Pools) -> None:
    run(ranks, (2,), out_of_range)


def embed(sizes: tuple[int, ...], padding: int | None) -> None:
    mesh, axes = make_mesh(sizes)
    ids = torch.randint(8, (3, 5), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = 5

    def split(t: Tensors) -> torch.Tensor:
        rows = graph_kernels.embedding_vocabulary(
            convert(t["weight"], mesh, axes, "I", "S0"), ids, padding, False, False, mesh, axes
        )
        return convert(rows, mesh, axes, "P", "I")

    compare(split, lambda t: F.embedding(ids, t["weight"], padding), {"weight": draw(8, 6)})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("padding", [None, 0, 5, 7])
def test_embedding_vocabulary(ranks: Pools, sizes: tuple[int, ...], padding: int | None) -> None:
    run(ranks, sizes, embed, padding)


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
