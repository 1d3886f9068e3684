"""Seconds of conversions against Dijkstra's algorithm on a graph that this test builds from the
table of steps.
"""

import itertools
import math
import random
import time
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from autopar.cost_model import Cluster, ConversionCosts, Level, collective_seconds
from autopar.cost_model.conversion import STEP_SECONDS
from autopar.errors import PlanError
from autopar.ir.layout import (
    I,
    Layout,
    P,
    R,
    S,
    Type,
    can_convert,
    dual,
    is_legal,
    local_shape,
    parse_layout,
)

# (from, to): collectives of the forward and of the backward. "Sa" to "Sb" is between different
# dims.
STEPS = {
    ("I", "R"): (None, "all_reduce"),
    ("I", "S"): (None, "all_gather"),
    ("I", "P"): (None, None),
    ("R", "I"): (None, None),
    ("R", "P"): (None, None),
    ("R", "S"): (None, None),
    ("P", "I"): ("all_reduce", None),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "I"): ("all_gather", None),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "P"): (None, None),
    ("S", "S"): ("all_to_all", "all_to_all"),
}
H100 = Cluster.load("h100-sxm")
NO_COPIES = replace(H100, device=replace(H100.device, memory_bandwidth=1e40))
CASES = [
    ((32, 8), (64, 2048, 32)),
    ((4, 4), (8, 6, 16)),
    ((2, 8), (16, 16)),
    ((3, 2), (6, 1, 12, 4)),
    ((8, 1), (8, 8)),
    ((4,), (4, 8)),
]


def layouts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[Layout]:
    types = (I, R, P, *map(S, range(len(shape))))
    return [
        layout
        for layout in itertools.product(types, repeat=len(sizes))
        if is_legal(shape, layout, sizes)
    ]


def moves(
    layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[int, Type, Layout]]:
    """Every single step: (axis, the type it takes, the layout after it)."""
    result = []
    for axis, target in itertools.product(range(len(sizes)), (I, R, P, *map(S, range(len(shape))))):
        after = (*layout[:axis], target, *layout[axis + 1 :])
        if (
            target is not layout[axis]
            and can_convert(layout, axis, target)
            and is_legal(shape, after, sizes)
        ):
            result.append((axis, target, after))
    return result


def graph(
    conversions: ConversionCosts,
    shape: tuple[int, ...],
    itemsize: int,
    differentiable: bool,
    step: float = STEP_SECONDS,
    summed: int | None = None,
) -> nx.DiGraph:
    sizes = conversions.sizes
    result = nx.DiGraph()
    for layout in layouts(shape, sizes):
        for axis, target, after in moves(layout, shape, sizes):
            whole = (*layout[:axis], I, *layout[axis + 1 :])
            elements = math.prod(local_shape(shape, whole, sizes))
            sums = target is R  # its gradient is a pending sum
            bytes_each = (itemsize, summed if summed and sums else itemsize)[: 1 + differentiable]
            used = zip(STEPS[layout[axis].kind, target.kind], bytes_each, strict=False)
            price = step + sum(
                collective_seconds(kind, float(elements * n), conversions.axes[axis])
                for kind, n in used
                if kind
            )
            result.add_edge(layout, after, weight=price)
    return result


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(("sizes", "shape"), CASES)
def test_matrix_is_dijkstra(
    sizes: tuple[int, ...], shape: tuple[int, ...], differentiable: bool
) -> None:
    conversions = ConversionCosts(sizes, NO_COPIES)
    states = layouts(shape, sizes)
    found = conversions.matrix(shape, 2, differentiable, states)
    distances = dict(
        nx.all_pairs_dijkstra_path_length(graph(conversions, shape, 2, differentiable))
    )
    expected = np.array([[distances[src][dst] for dst in states] for src in states])
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(("sizes", "shape"), [*CASES, ((4, 8, 8), (256, 64, 64))])
def test_paths_are_legal_and_cost_what_the_matrix_says(
    sizes: tuple[int, ...], shape: tuple[int, ...], differentiable: bool
) -> None:
    conversions = ConversionCosts(sizes, H100)
    states = layouts(shape, sizes)
    prices = conversions.matrix(shape, 4, differentiable, states)
    generator = random.Random(0)
    pairs = list(itertools.product(range(len(states)), repeat=2))
    for i, j in generator.sample(pairs, min(400, len(pairs))):
        layout = states[i]
        path = conversions.path(shape, 4, differentiable, states[i], states[j])
        for axis, before, after in path:
            assert layout[axis] is before
            assert can_convert(layout, axis, after)
            layout = (*layout[:axis], after, *layout[axis + 1 :])
            assert is_legal(shape, layout, sizes)
        assert layout == states[j]
        terms = conversions.terms(shape, 4, differentiable, states[i], states[j])
        assert sum(term.seconds for term in terms) + len(path) * STEP_SECONDS == pytest.approx(
            prices[i, j], rel=1e-9, abs=0
        )
        assert differentiable or all(term.phase == "forward" for term in terms)


@pytest.mark.parametrize("summed", [4, 1])
@pytest.mark.parametrize(("sizes", "shape"), CASES[:4])
def test_a_gradient_summed_in_another_dtype(
    sizes: tuple[int, ...], shape: tuple[int, ...], summed: int
) -> None:
    conversions = ConversionCosts(sizes, NO_COPIES)
    states = layouts(shape, sizes)
    found = conversions.matrix(shape, 2, True, states, summed)
    distances = dict(
        nx.all_pairs_dijkstra_path_length(graph(conversions, shape, 2, True, summed=summed))
    )
    expected = np.array([[distances[src][dst] for dst in states] for src in states])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)
    np.testing.assert_array_equal(
        conversions.matrix(shape, 2, True, states, 2), conversions.matrix(shape, 2, True, states)
    )
    conversions = ConversionCosts(sizes, H100)  # with copies
    prices = conversions.matrix(shape, 2, True, states, summed)
    pairs = list(itertools.product(range(len(states)), repeat=2))
    for i, j in random.Random(0).sample(pairs, min(200, len(pairs))):
        steps = len(conversions.path(shape, 2, True, states[i], states[j], summed))
        terms = conversions.terms(shape, 2, True, states[i], states[j], summed)
        assert sum(term.seconds for term in terms) + steps * STEP_SECONDS == pytest.approx(
            prices[i, j], rel=1e-9, abs=0
        )


def test_of_equally_cheap_paths_the_shortest() -> None:
    """On links whose figures are powers of two, sums are exact and equal costs are equal. A step
    then counts 1 beside 2**30 for its work.
    """
    links = (Level("exact", None, 2.0**-17, 2.0**38),)
    conversions = ConversionCosts((4, 4), replace(NO_COPIES, links=links))
    shape = (64, 64, 4096)
    steps = graph(conversions, shape, 2, True, step=0.0)
    for _, _, data in steps.edges(data=True):
        data["weight"] = int(data["weight"] * 2**60) * 2**30 + 1
    for src, distances in nx.all_pairs_dijkstra_path_length(steps):
        for dst, distance in distances.items():
            assert len(conversions.path(shape, 2, True, src, dst)) == distance % 2**30


@pytest.mark.parametrize(("sizes", "shape"), CASES[:4])
def test_a_conversion_costs_what_that_of_its_gradient_does(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    states = layouts(shape, sizes)
    conversions = ConversionCosts(sizes, H100)
    there = conversions.matrix(shape, 2, True, states)
    back = conversions.matrix(shape, 2, True, [dual(state) for state in states])
    np.testing.assert_allclose(there, back.T, rtol=1e-12)


def test_prices_are_a_distance_and_grow_with_bytes() -> None:
    sizes, shape = (4, 8), (64, 256, 64)
    conversions = ConversionCosts(sizes, H100)
    states = layouts(shape, sizes)
    small, large = (conversions.matrix(shape, itemsize, True, states) for itemsize in (2, 4))
    assert (np.diag(small) == 0).all()
    assert (small[~np.eye(len(states), dtype=bool)] >= STEP_SECONDS).all()
    assert (small <= large).all()
    assert (conversions.matrix(shape, 2, False, states) <= small).all()
    through = (small[:, :, None] + small[None]).min(axis=1)
    np.testing.assert_allclose(small, through, rtol=1e-12)


def kinds(text: str, phase: str, **options: bool) -> list[str]:
    src, dst = (parse_layout(side) for side in text.split(" > "))
    terms = ConversionCosts((8,), H100).terms(
        (64, 4096, 4096), 2, options.get("differentiable", True), src, dst
    )
    return [term.kind for term in terms if term.phase == phase]


def test_megatron_and_zero_are_conversions() -> None:
    assert kinds("I > R", "forward") == []  # f
    assert kinds("I > R", "backward") == ["all_reduce"]
    assert kinds("P > I", "forward") == ["all_reduce"]  # g
    assert kinds("P > I", "backward") == []
    assert kinds("S0 > R", "forward") == ["all_gather"]  # sequence parallelism, ZeRO-3
    assert kinds("S0 > R", "backward") == ["reduce_scatter"]
    assert kinds("P > S0", "forward") == ["reduce_scatter"]
    assert kinds("P > S0", "backward") == ["all_gather"]
    assert kinds("S1 > S2", "forward") == ["all_to_all", "copy"]
    assert kinds("P > R", "backward", differentiable=False) == []


def test_chunks_of_an_inner_dim_are_copied() -> None:
    rates = {"matmul": ((1.0, 1.0),), "elementwise": ((1.0, 0.8),)}
    device = replace(H100.device, efficiency=rates)
    conversions = ConversionCosts((8,), replace(H100, device=device))
    bandwidth = 0.8 * device.memory_bandwidth
    outer, inner = (
        conversions.matrix((64, 4096), 2, False, [(S(dim),), (R,)])[0, 1] for dim in (0, 1)
    )
    assert inner - outer == pytest.approx(2 * 64 * 4096 * 2 / bandwidth)
    first = conversions.matrix((1, 4096), 2, False, [(S(1),), (R,)])[0, 1]  # nothing lies before it
    assert first == pytest.approx(
        STEP_SECONDS + collective_seconds("all_gather", 8192.0, conversions.axes[0])
    )


def test_an_axis_of_one_costs_steps_only() -> None:
    states = layouts((8, 8), (1,))
    expected = STEP_SECONDS * (1 - np.eye(len(states)))
    np.testing.assert_array_equal(
        ConversionCosts((1,), H100).matrix((8, 8), 4, True, states), expected
    )


def test_a_later_axis_is_undone_first() -> None:
    conversions = ConversionCosts((4, 8), H100)
    path = conversions.path((64, 8), 2, True, parse_layout("S0 S0"), parse_layout("I S0"))
    assert path[0][0] == 1
    reverse = conversions.path((64, 8), 2, False, parse_layout("I S0"), parse_layout("S0 S0"))
    assert reverse[-1][0] == 1


def test_stages_share_the_links() -> None:
    alone, staged = ConversionCosts((2, 4), H100), ConversionCosts((2, 2), H100, stages=3)
    assert [hop.level for axis in alone.axes for hop in axis.hops] == ["nvlink", "nvlink"]
    assert staged.axes == ConversionCosts((2, 2), H100).axes
    wide = [ConversionCosts((3,), H100, stages=count).axes[0] for count in (1, 4)]
    assert wide[0] != wide[1]  # the third stage lies on two nodes


def test_a_layout_that_does_not_divide() -> None:
    conversions = ConversionCosts((4,), H100)
    with pytest.raises(PlanError, match="layout S1 is not legal"):
        conversions.matrix((8, 6), 2, True, [(S(1),)])


@pytest.mark.alone
def test_three_axes_are_fast() -> None:
    sizes, shape = (4, 8, 8), (256, 2048, 256, 256)
    states = layouts(shape, sizes)
    assert len(states) == 343
    start = time.perf_counter()
    ConversionCosts(sizes, H100).matrix(shape, 2, True, states)
    assert time.perf_counter() - start < 2
