"""Convolutions with cut spatial dims: the kernel compared with torch on one device in float64, the
dims that the rule allows to be cut, and whole programs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from emulate import SUMMANDS, Program, cut, join, run_call
from equivalence import compare as differences
from equivalence import worst
from pool import Pools
from test_kernels import compare, convert, draw, make_mesh, run
from test_rules import row
from torch import nn

import autopar
from autopar.cost_model import AxisLinks, collective_seconds
from autopar.cost_model.collectives import Hop
from autopar.ir.layout import Layout, R, S, dual
from autopar.ir.plan_data import NodePlan
from autopar.rules.convolution import Window
from autopar.runtime.kernels import graph_kernels
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.strategies import Strategy

aten = torch.ops.aten
SIZES = ((1,), (2,), (4,), (2, 2))
Tensors = dict[str, "torch.Tensor | None"]

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


# --- The rule.


def options(
    *args: Any, sizes: Sequence[int] = (2,), target: Any = aten.conv1d.default
) -> dict[str, Strategy]:
    """Strategies by their layout of the input."""
    program = Program(row(target, *args))
    return {
        str(s): s
        for s in node_strategies(program.rule, program.trains, True, sizes, lambda *_: True)
    }


def cut_dims(found: dict[str, Strategy]) -> set[tuple[int, str | None]]:
    """The spatial dims that some strategy cuts, and its kernel."""
    return {
        (t.dim, k)
        for s in found.values()
        for t, k in zip(s.ins[0], s.kernels, strict=True)
        if t.is_shard and t.dim >= 2
    }


@pytest.mark.parametrize(
    ("length", "kernel", "stride", "padding", "dilation", "expected"),
    [
        (8, 3, 1, 1, 1, "conv_halo"),
        (8, 4, 1, "same", 1, "conv_halo"),
        (8, 3, 1, "same", 2, "conv_halo"),
        (8, 3, 2, 1, 1, "conv_halo"),
        (8, 4, 4, 0, 1, None),  # patches
        (8, 1, 1, 0, 1, None),
        (8, 1, 2, 0, 1, None),
        (8, 3, 1, "valid", 1, "whole"),  # fewer outputs than inputs
        (8, 3, 1, 2, 1, "whole"),  # more of them
        (9, 3, 2, 1, 1, "whole"),  # outputs times stride are not the inputs
        (7, 3, 1, 1, 1, "whole"),  # 7 does not divide by 2
        (6, 3, 2, 1, 1, "whole"),  # nor do 3 outputs
        (8, 8, 8, 0, 1, "whole"),  # one patch
        (4, 5, 1, 2, 1, "conv_halo"),
        (4, 7, 1, 3, 1, "whole"),  # a halo longer than a chunk
    ],
)
def test_what_may_be_cut(
    length: int, kernel: int, stride: int, padding: int | str, dilation: int, expected: str | None
) -> None:
    target = aten.conv1d.padding if isinstance(padding, str) else aten.conv1d.default
    given = [padding] if isinstance(padding, int) else padding
    found = options(
        draw(4, 6, length), draw(4, 6, kernel), draw(4), [stride], given, [dilation], target=target
    )
    assert cut_dims(found) == (set() if expected == "whole" else {(2, expected)})


def test_a_dim_may_be_cut_on_several_axes_until_its_chunks_are_shorter_than_the_halo() -> None:
    def on(length: int) -> set[str]:
        found = options(draw(4, 2, length), draw(4, 2, 5), draw(4), [1], [2], sizes=(2, 2))
        return {s for s in found if s.startswith("S2 ")}

    assert "S2 S2, R R, R R -> S2 S2" in on(8)
    assert "S2 R, R R, R R -> S2 R" in on(4)
    assert "S2 S2, R R, R R -> S2 S2" not in on(4)


def test_a_plane_is_cut_both_ways_and_the_weight_has_a_pending_gradient() -> None:
    found = options(
        draw(4, 6, 8, 8),
        draw(4, 6, 3, 1),
        None,
        [1, 1],
        [1, 0],
        sizes=(2, 2),
        target=aten.conv2d.default,
    )
    both = found["S2 S3, R R -> S2 S3"]
    assert both.kernels == ("conv_halo", None)
    assert both.factors == ("y0", "y1")
    assert "S2 S1, R S0 -> S2 S1" not in found  # a contraction gives a sum
    assert found["S2 S1, R S1 -> S2 P"].kernels == ("conv_halo", None)


def test_patches_are_the_plain_operator() -> None:
    found = options(
        draw(2, 4, 8, 16),
        draw(6, 4, 2, 4),
        draw(6),
        [2, 4],
        sizes=(2, 2),
        target=aten.conv2d.default,
    )
    cutting = [s for s in found.values() if any(t.is_shard and t.dim >= 2 for t in s.ins[0])]
    assert {(S(i), S(j)) for i in (2, 3) for j in (2, 3)} <= {s.ins[0] for s in cutting}
    assert {k for s in cutting for k in s.kernels} == {None}


def test_what_neighbours_send_takes_no_less_than_an_all_to_all() -> None:
    """Empty messages are sent as well."""
    hop = Hop("links", 4, 1, False, latency=1e-6, bandwidth=1e9)
    assert collective_seconds("shift", 1e6, AxisLinks(4, (hop,))) == pytest.approx(1e-6 + 1e-3)
    measured = AxisLinks(
        4,
        (
            replace(
                hop,
                measured={"all_to_all": ((1.0, 0.5), (1e6, 1.0)), "send": ((1.0, 0.1), (1e6, 2.0))},
            ),
        ),
    )
    assert [
        collective_seconds("shift", nbytes, measured) for nbytes in (1.0, 1e6)
    ] == pytest.approx([0.5, 2.0])


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


# --- Whole programs.


class Net(nn.Module):
    """Convolutions that keep the spatial sizes, one that halves them, and a loss for each place:
    only sums need all places.
    """

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv1d
        self.first, self.second, self.third = (
            conv(3, 8, 3, padding=1),
            conv(8, 8, 5, padding="same"),
            conv(8, 4, 3, 2, 1),
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.first(x))
        y = self.third(y + F.gelu(self.second(y)))
        return F.cross_entropy(y, labels)


def network(dims: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    space = (16, 8)[:dims]
    labels = torch.randint(4, (4, *(n // 2 for n in space)))
    return Net(dims).double(), {"x": draw(4, 3, *space), "labels": labels}


def compiled_network(dims: int, options: dict[str, Any]) -> tuple[float, str, dict[str, NodePlan]]:
    model, sample = network(dims)
    compiled = autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )
    error, name = worst(differences(model, sample, compiled))
    halos = {n: p for n, p in compiled.plan.nodes.items() if "conv_halo" in p.kernels}
    return error, name, halos


ONE = dict.fromkeys(("first", "second", "third"), "S2")
BOTH = dict.fromkeys(("first", "second", "third"), "S2 S3")
TWICE = dict.fromkeys(("first", "second"), "S2 S2")


@pytest.mark.parametrize(
    ("dims", "world_size", "options"),
    [
        (1, 2, dict(mesh=(2,), constraints=ONE)),
        (2, 2, dict(mesh=(2,), constraints=ONE)),
        (1, 2, dict(mesh=(2,), constraints=ONE, recompute="full")),
        (2, 4, dict(mesh=(2, 2), constraints=BOTH)),
        (1, 4, dict(mesh=(2, 2), constraints=TWICE)),
    ],
)
def test_equals_one_device(
    ranks: Pools, dims: int, world_size: int, options: dict[str, Any]
) -> None:
    for error, name, halos in ranks(world_size).run(compiled_network, dims, options):
        assert error < 1e-9, name
        assert len(halos) == len(options["constraints"])
        for plan in halos.values():
            assert plan.ins[0] == plan.out
            assert plan.ins[1] == (R,) * len(plan.out)
