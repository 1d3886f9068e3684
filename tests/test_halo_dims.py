"""The dims of a convolution that its rule allows to be cut, and whole programs with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from emulate import Program
from equivalence import compare as differences
from equivalence import worst
from kernel_checks import draw
from pool import Pools
from rule_rows.operands import row
from torch import nn

import autopar
from autopar.cost_model import AxisLinks, collective_seconds
from autopar.cost_model.collectives import Hop
from autopar.ir.layout import R, S
from autopar.ir.plan_data import NodePlan
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.strategies import Strategy

aten = torch.ops.aten


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
