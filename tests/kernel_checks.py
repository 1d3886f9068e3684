"""A kernel on a mesh of ranks, compared with torch on one device in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from pool import Pools

from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh

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
