"""Seconds of collectives against closed forms, and against the bytes that must pass each node's
NICs.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_model import (
    Cluster,
    Level,
    axis_links,
    collective_seconds,
    point_to_point,
    received_bytes,
)
from autopar.cost_model.collectives import COLLECTIVE_KINDS, AxisLinks, Hop
from autopar.errors import PlanError

GB = 1e9
PRESET = Cluster.load("a100-sxm")
A100 = replace(PRESET, links=tuple(replace(level, startup=0.0) for level in PRESET.links))
NVLINK = 300e9 * A100.links[0].efficiency
NIC = 200e9 * A100.links[1].efficiency
LATENCY, NETWORK_LATENCY = (level.latency for level in A100.links)


def test_all_reduce_in_a_node_is_a_ring_when_long() -> None:
    (axis,) = axis_links((8,), A100)
    assert collective_seconds("all_reduce", GB, axis) == pytest.approx(
        2 * 7 * LATENCY + 2 * 7 / 8 * GB / NVLINK
    )
    assert collective_seconds("reduce_scatter", GB, axis) == pytest.approx(
        7 * LATENCY + 7 / 8 * GB / NVLINK
    )
    assert axis.bandwidth == pytest.approx(NVLINK)


def test_short_messages_take_log_steps() -> None:
    (axis,) = axis_links((8,), A100)
    assert collective_seconds("all_reduce", 8.0, axis) == pytest.approx(2 * 3 * LATENCY, rel=1e-3)
    assert collective_seconds("all_to_all", 8.0, axis) == pytest.approx(3 * LATENCY, rel=1e-3)
    assert collective_seconds("broadcast", GB, axis) == pytest.approx(3 * LATENCY + GB / NVLINK)
    assert axis.latency == pytest.approx(3 * LATENCY)


def test_all_to_all_in_a_node() -> None:
    (axis,) = axis_links((8,), A100)
    assert collective_seconds("all_to_all", GB, axis) == pytest.approx(
        7 * LATENCY + GB / 8 * 7 / 8 / NVLINK
    )


def test_an_axis_between_nodes_shares_the_nics() -> None:
    slow, fast = axis_links((4, 8), A100)  # 8 groups, each with one rank in every node
    assert slow.hops == (Hop("network", 4, 1, NETWORK_LATENCY, NIC / 8),)
    assert fast.hops == (Hop("nvlink", 8, 1, LATENCY, NVLINK),)
    assert collective_seconds("all_gather", GB, slow) == pytest.approx(
        3 * NETWORK_LATENCY + 3 / 4 * GB / (NIC / 8)
    )


def test_contention_goes_with_the_groups_that_live_in_a_node() -> None:
    prices = [
        collective_seconds("all_gather", GB, axis_links((4, stride), A100)[0])
        for stride in (8, 16, 32)
    ]
    assert prices == pytest.approx([prices[0]] * 3)  # 8 ranks a node in 8 groups, however far apart
    assert [hop.level for hop in axis_links((2, 4, 2), A100)[1].hops] == ["nvlink"]


def test_an_axis_over_two_levels_runs_level_by_level() -> None:
    (axis,) = axis_links((32,), A100)
    assert axis.hops == (
        Hop("nvlink", 8, 1, LATENCY, NVLINK),
        Hop("network", 4, 8, NETWORK_LATENCY, NIC),
    )
    inside, between = 7 * LATENCY + 7 / 8 * GB / NVLINK, 3 * NETWORK_LATENCY + 3 / 4 * GB / NIC
    assert collective_seconds("all_gather", GB, axis) == pytest.approx(inside + between)
    assert collective_seconds("all_reduce", GB, axis) == pytest.approx(2 * (inside + between))
    middle = axis_links((8, 4), A100)[0]  # 2 ranks a node, in 4 groups
    assert middle.hops == (
        Hop("nvlink", 2, 1, LATENCY, NVLINK),
        Hop("network", 4, 2, NETWORK_LATENCY, NIC / 4),
    )


def test_ranks_that_straddle_nodes() -> None:
    outer, inner = axis_links((4, 6), A100)  # the second group of 6 holds devices 6 to 11
    assert [hop.level for hop in inner.hops] == ["nvlink", "network"]
    assert outer.hops[-1].level == "network"


@pytest.mark.parametrize(
    "sizes", [(32,), (4, 8), (8, 4), (2, 16), (16, 2), (4, 4, 2), (2, 8, 2), (64, 1)]
)
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_no_node_receives_more_than_its_nics_carry(sizes: tuple[int, ...], kind: str) -> None:
    """Counts the bytes that each node must receive, rank by rank. Fewer seconds than these bytes
    over the NIC's bandwidth are impossible. Without latency and with free links inside nodes, the
    seconds are exactly that.
    """
    free = replace(
        A100,
        links=(
            replace(A100.links[0], bandwidth=1e30, latency=0.0),
            replace(A100.links[1], latency=0.0),
        ),
    )
    for position, axis in enumerate(axis_links(sizes, free)):
        ranks = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), position, -1).reshape(
            -1, sizes[position]
        )
        into = np.zeros(math.prod(sizes) // 8)
        for group in ranks:
            nodes = group // 8
            for node in np.unique(nodes):
                here, n = int((nodes == node).sum()), len(group)
                away = n - here
                into[node] += away * GB / n if kind == "all_gather" else here * away * GB / n**2
        assert collective_seconds(kind, GB, axis) == pytest.approx(into.max() / NIC, rel=1e-9)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_arrays_are_priced_like_numbers_and_grow(kind: str) -> None:
    nbytes = np.logspace(0, 10, 50)
    for axis in axis_links((4, 3, 8), A100):
        prices = collective_seconds(kind, nbytes, axis)
        assert prices.tolist() == [collective_seconds(kind, float(b), axis) for b in nbytes]
        assert (np.diff(prices) > 0).all()


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_an_axis_of_one_is_free(kind: str) -> None:
    axis = axis_links((8, 1), A100)[1]
    assert axis == AxisLinks(1, ())
    assert collective_seconds(kind, GB, axis) == 0
    assert received_bytes(kind, GB, 1) == 0
    assert axis.bandwidth == math.inf


def test_received_bytes() -> None:
    assert [received_bytes(kind, 16, 4) for kind in COLLECTIVE_KINDS] == [24, 12, 12, 3, 16, 16]


def test_three_levels() -> None:
    pods = replace(
        A100,
        links=(
            *A100.links[:1],
            replace(A100.links[1], size=32),
            Level("spine", None, 2e-5, 400e9, shared=True),
        ),
    )
    (axis,) = axis_links((128,), pods)
    assert [(hop.level, hop.ways, hop.inner) for hop in axis.hops] == [
        ("nvlink", 8, 1),
        ("network", 4, 8),
        ("spine", 4, 32),
    ]
    assert axis_links((4, 32), pods)[0].hops == (Hop("spine", 4, 1, 2e-5, 400e9 / 32),)


def test_too_few_devices() -> None:
    with pytest.raises(PlanError, match="has 8"):
        axis_links((2, 8), replace(A100, links=A100.links[:1]))


def test_a_collective_starts_once_and_a_message_too() -> None:
    (nvlink, network) = PRESET.links
    for sizes in ((8,), (2,), (16,)):
        (plain,), (started,) = axis_links(sizes, A100), axis_links(sizes, PRESET)
        for kind in COLLECTIVE_KINDS:
            assert collective_seconds(kind, GB, started) - collective_seconds(
                kind, GB, plain
            ) == pytest.approx(max(nvlink.startup, network.startup))
        assert point_to_point(GB, started) > point_to_point(GB, plain)


def test_what_was_measured_comes_before_the_formulas() -> None:
    """Between two points the seconds are linear in logarithms, below the first point constant,
    above the last point proportional.
    """
    curve = ((1e4, 1e-4), (1e6, 1e-3))
    level = replace(PRESET.links[0], measured={"all_reduce": {"4": curve}})
    measured = replace(PRESET, links=(level, PRESET.links[1]))
    (axis,), (other,) = axis_links((4,), measured), axis_links((8,), measured)
    assert [
        collective_seconds("all_reduce", n, axis) for n in (1.0, 1e4, 1e5, 1e6, 1e7)
    ] == pytest.approx([1e-4, 1e-4, 10**-3.5, 1e-3, 1e-2])
    assert collective_seconds("all_gather", GB, axis) == collective_seconds(
        "all_gather", GB, axis_links((4,), PRESET)[0]
    )
    assert collective_seconds("all_reduce", GB, other) == collective_seconds(
        "all_reduce", GB, axis_links((8,), PRESET)[0]
    )


def test_links_that_join_some_pairs_only() -> None:
    v100 = Cluster.load("v100-sxm2")
    taken = {
        n: collective_seconds("all_gather", GB, axis_links((n,), v100)[0]) * n / (n - 1)
        for n in (2, 4, 8)
    }
    assert taken[2] / taken[4] == pytest.approx(4, rel=0.01)
    assert taken[4] / taken[8] == pytest.approx(1.5, rel=0.01)
