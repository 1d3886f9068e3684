"""Cross entropy and embedding with a split vocabulary, compared with torch on one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import SIZES, Tensors, close, compare, convert, draw, make_mesh, run
from pool import Pools
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import RunError
from autopar.runtime.kernels import graph_kernels

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


def out_of_range(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    mesh, axes = make_mesh(sizes)
    for wrong in (8, 100, -1, -9):
        ids = torch.tensor([wrong, 0], dtype=dtype)
        with pytest.raises(RunError, match=rf"target out of range: .* \[0, 8\), .*{wrong}"):
            graph_kernels.cross_entropy_vocabulary(
                draw(2, 4), ids.long(), None, -100, 0.0, mesh, axes
            )
        with pytest.raises(RunError, match=rf"index out of range: .* \[0, 8\), .*{wrong}"):
            graph_kernels.embedding_vocabulary(draw(4, 2), ids, None, False, False, mesh, axes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_index_that_no_rank_holds_is_an_error_on_every_rank(
    ranks: Pools, dtype: torch.dtype
) -> None:
    run(ranks, (2,), out_of_range, dtype)


class Operators(TorchDispatchMode):
    """The names of the operators that run, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators(sizes: tuple[int, ...]) -> tuple[list[str], list[str]]:
    mesh, axes = make_mesh(sizes)
    ids = torch.tensor([5, 0])
    with Operators() as embedding:
        graph_kernels.embedding_vocabulary(draw(4, 2), ids, None, False, False, mesh, axes)
    with Operators() as loss:
        graph_kernels.cross_entropy_vocabulary(draw(2, 4), ids, None, -100, 0.0, mesh, axes)
    return embedding.names, loss.names


def test_no_operator_checks_indices_alone(ranks: Pools) -> None:
    """A lookup of a place that is no row fails by itself. What gives the places is needed anyway,
    and it is less than what computes them and the outside without a check: sub, lt, ge, or, fill.
    """
    rows = ["div", "clamp_", "sub"]
    for embedding, loss in ranks(2).run(operators, (2,)):
        own = embedding[embedding.index("div") :]
        assert own == [*rows, "embedding", "ne", "masked_fill_"]
        targets = loss[loss.index("ne") : loss.index("amax")]
        assert targets == ["ne", "bitwise_not", "masked_fill", *rows, "eq", "logical_and_"]
        assert not [name for name in loss if "assert" in name]


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
