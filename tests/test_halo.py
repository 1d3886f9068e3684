"""Convolutions with cut spatial dims: the kernel compared with torch on one device in float64, the
dims that the rule allows to be cut, and whole programs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from emulate import SUMMANDS, Program, cut, join, run_call
from kernel_checks import SIZES, Tensors, compare, convert, draw, make_mesh, run
from pool import Pools
from rule_rows.operands import row

from autopar.ir.layout import Layout, dual
from autopar.rules.convolution import Window
from autopar.runtime.kernels import graph_kernels
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.strategies import Strategy

aten = torch.ops.aten

# --- The kernel: spatial dims [*, 16] or [*, 16, 8], in chunks of 4 on four ranks.

LINES: dict[str, dict[str, Any]] = {
    "1": dict(kernel=1),
    "3": dict(kernel=3, padding=1),
    "3 on the left": dict(kernel=3, padding=(2, 0)),  # causal
    "3 on the right": dict(kernel=3, padding=(0, 2)),
    "4": dict(kernel=4, padding=(1, 2)),
    "5": dict(kernel=5, padding=2),
    "3 dilated": dict(kernel=3, padding=2, dilation=2),
    "5 as wide as chunks": dict(kernel=5, padding=4, dilation=2),
    "1 by 2": dict(kernel=1, stride=2),
    "2 by 2": dict(kernel=2, stride=2),
    "3 by 2": dict(kernel=3, padding=1, stride=2),  # nothing from the right
    "4 by 2": dict(kernel=4, padding=1, stride=2),
    "5 by 2": dict(kernel=5, padding=2, stride=2),
    "3 by 2 dilated": dict(kernel=3, padding=2, stride=2, dilation=2),
    "3 by 4": dict(kernel=3, padding=1, stride=4),
}


def window(
    kernel: int, padding: int | tuple[int, int] = 0, stride: int = 1, dilation: int = 1
) -> Window:
    return Window(
        stride,
        dilation,
        (padding, padding) if isinstance(padding, int) else padding,
        dilation * (kernel - 1),
    )


def halo_line(
    sizes: tuple[int, ...], options: dict[str, Any], groups: int = 1, bias: bool = True
) -> None:
    mesh, axes = make_mesh(sizes)
    w = window(**options)

    def split(t: Tensors) -> torch.Tensor:
        x = convert(t["x"], mesh, axes, "I", "S2")
        weight, shift = (
            None if t[k] is None else convert(t[k], mesh, axes, "I", "R")
            for k in ("weight", "bias")
        )
        y = graph_kernels.conv_halo(
            x, weight, shift, (w.stride,), (w.dilation,), (w.halo,), mesh, (axes,)
        )
        return convert(y, mesh, axes, "S2", "I")

    def whole(t: Tensors) -> torch.Tensor:
        return F.conv1d(
            F.pad(t["x"], w.padding), t["weight"], t["bias"], w.stride, 0, w.dilation, groups
        )

    given = {
        "weight": draw(6, 4 // groups, options["kernel"], seed=1),
        "bias": draw(6, seed=2) if bias else None,
    }
    compare(split, whole, {"x": draw(3, 4, 16), **given})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("line", LINES)
def test_a_line(ranks: Pools, sizes: tuple[int, ...], line: str) -> None:
    run(ranks, sizes, halo_line, LINES[line])


@pytest.mark.parametrize(("groups", "bias"), [(2, True), (1, False)])
def test_a_line_in_groups_and_without_bias(ranks: Pools, groups: int, bias: bool) -> None:
    run(ranks, (4,), halo_line, LINES["4 by 2"], groups, bias)


def halo_plane(
    sizes: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], along: tuple[dict[str, Any], ...]
) -> None:
    mesh, _ = make_mesh(sizes)
    windows = [window(**options) for options in along]
    stride, dilation = [w.stride for w in windows], [w.dilation for w in windows]
    layout = {axis: f"S{2 + dim}" for dim, axes in enumerate(cuts) for axis in axes}

    def split(t: Tensors) -> torch.Tensor:
        x, weight, bias = t["x"], t["weight"], t["bias"]
        for axis, to in sorted(layout.items()):
            x = convert(x, mesh, (axis,), "I", to)
            weight, bias = (convert(p, mesh, (axis,), "I", "R") for p in (weight, bias))
        margins = [w.halo if axes else w.padding for w, axes in zip(windows, cuts, strict=True)]
        y = graph_kernels.conv_halo(x, weight, bias, stride, dilation, margins, mesh, cuts)
        for axis, to in sorted(layout.items(), reverse=True):
            y = convert(y, mesh, (axis,), to, "I")
        return y

    def whole(t: Tensors) -> torch.Tensor:
        sides = [n for w in reversed(windows) for n in w.padding]
        return F.conv2d(F.pad(t["x"], sides), t["weight"], t["bias"], stride, 0, dilation)

    given = {
        "weight": draw(4, 3, *(options["kernel"] for options in along), seed=1),
        "bias": draw(4, seed=2),
    }
    compare(split, whole, {"x": draw(2, 3, 16, 8), **given})


PLANES = {
    "3x3": (LINES["3"], LINES["3"]),
    "5x1": (LINES["5"], LINES["1"]),
    "4x3": (LINES["4"], LINES["3 by 2"]),
    "3x4": (LINES["3 by 2 dilated"], LINES["4"]),
}
CUTS = [
    ((2,), ((0,), ())),
    ((2,), ((), (0,))),
    ((4,), ((0,), ())),
    *(((2, 2), cuts) for cuts in (((0,), (1,)), ((1,), (0,)), ((0, 1), ()))),
]


@pytest.mark.parametrize(("sizes", "cuts"), CUTS)
@pytest.mark.parametrize("plane", PLANES)
def test_a_plane(
    ranks: Pools, sizes: tuple[int, ...], cuts: tuple[tuple[int, ...], ...], plane: str
) -> None:
    run(ranks, sizes, halo_plane, cuts, PLANES[plane])


# --- Lowered calls: conv_halo for the strategies of a rule, on all ranks.

CALLS = {
    "conv1d": row(
        aten.conv1d.default, draw(4, 4, 8), draw(4, 4, 3, seed=1), draw(4, seed=2), [1], [1]
    ),
    "conv1d same": row(
        aten.conv1d.padding, draw(4, 4, 8), draw(4, 4, 4, seed=1), draw(4, seed=2), [1], "same"
    ),
    "conv2d": row(
        aten.conv2d.default, draw(2, 4, 8, 8), draw(4, 4, 3, 3, seed=1), None, [2, 2], [1, 1]
    ),
    "conv2d same": row(
        aten.conv2d.padding,
        draw(2, 4, 8, 8),
        draw(4, 4, 4, 3, seed=1),
        draw(4, seed=2),
        [1, 1],
        "same",
    ),
    "grouped": row(
        aten.conv2d.default,
        draw(2, 4, 8, 8),
        draw(8, 1, 3, 5, seed=1),
        draw(8, seed=2),
        [1, 1],
        [1, 2],
        [1, 1],
        4,
    ),
    "conv3d": row(
        aten.conv3d.default,
        draw(2, 2, 4, 4, 4),
        draw(2, 2, 3, 1, 2, seed=1),
        draw(2, seed=2),
        [1, 1, 2],
        [1, 0, 0],
    ),
}


def lowered(sizes: tuple[int, ...], name: str) -> int:
    """Checks as ``Program.check`` does, but each rank runs its part. Returns the number of
    strategies.
    """
    mesh, _ = make_mesh(sizes)
    program, place = Program(CALLS[name]), mesh.index(range(len(sizes)))
    (output,) = program.outputs
    weights = draw(*output.shape, seed=3)
    wholes = [x.clone().requires_grad_() for x in program.tensors]
    expected = torch.autograd.grad(run_call(program.call, wholes), wholes, weights)
    found = [
        s
        for s in node_strategies(program.rule, program.trains, True, sizes, lambda *_: True)
        if "conv_halo" in s.kernels
    ]

    def check(part: torch.Tensor, layout: Layout, whole: torch.Tensor, strategy: Strategy) -> None:
        parts: list[Any] = [None] * mesh.size
        dist.all_gather_object(parts, part)
        torch.testing.assert_close(
            join(parts, layout, sizes),
            whole,
            rtol=1e-10,
            atol=1e-10,
            msg=lambda m: f"{strategy}: {m}",
        )

    for strategy in found:
        SUMMANDS.manual_seed(0)  # pending sums are of random parts, the same on all ranks
        pieces = [
            cut(x, layout, sizes)[place]
            for x, layout in zip(program.tensors, strategy.ins, strict=True)
        ]
        leaves = [piece.clone().requires_grad_() for piece in pieces]
        call = program.local(strategy, sizes)
        (y,) = run_call(call, [*leaves, mesh])  # type: ignore[list-item]
        check(y.detach(), strategy.out, output, strategy)
        grads = torch.autograd.grad(y, leaves, cut(weights, dual(strategy.out), sizes)[place])
        for grad, layout, whole in zip(grads, strategy.ins, expected, strict=True):
            check(grad, dual(layout), whole, strategy)
    return len(found)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("name", CALLS)
def test_lowered_calls(ranks: Pools, sizes: tuple[int, ...], name: str) -> None:
    assert run(ranks, sizes, lowered, name)[0] > 0
