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
from autopar.cost_model.collectives import AxisLinks, Hop
from autopar.cost_model.links import COLLECTIVE_KINDS, CollectiveFigures
from autopar.errors import PlanError

GB = 1e9
PRESET = Cluster.load("a100-sxm")
A100 = replace(PRESET, links=tuple(replace(level, startup=0.0) for level in PRESET.links))
NVLINK = 300e9 * A100.links[0].efficiency
NIC = 200e9 * A100.links[1].efficiency
LATENCY, NETWORK_LATENCY = (level.latency for level in A100.links)


def hop(level: int, ways: int, inner: int, groups: int = 1) -> Hop:
    """A hop of the A100 preset without start-up."""
    found = A100.links[level]
    rate = found.bandwidth / groups if found.shared else found.bandwidth * inner
    return Hop(found.name, ways, inner, level > 0, found.latency, rate, found.efficiency)


def test_collectives_in_a_node_are_rings() -> None:
    (axis,) = axis_links((8,), A100)
    assert collective_seconds("all_reduce", GB, axis) == pytest.approx(
        2 * 7 * LATENCY + 2 * 7 / 8 * GB / NVLINK
    )
    assert collective_seconds("reduce_scatter", GB, axis) == pytest.approx(
        7 * LATENCY + 7 / 8 * GB / NVLINK
    )
    assert collective_seconds("all_reduce", 8.0, axis) == pytest.approx(2 * 7 * LATENCY, rel=1e-3)
    assert collective_seconds("broadcast", GB, axis) == pytest.approx(7 * LATENCY + GB / NVLINK)
    assert axis.bandwidth == pytest.approx(NVLINK)
    assert collective_seconds("all_gather", 0.0, axis) == pytest.approx(7 * LATENCY)


def test_all_to_all_in_a_node() -> None:
    (axis,) = axis_links((8,), A100)
    assert collective_seconds("all_to_all", GB, axis) == pytest.approx(
        7 * LATENCY + GB / 8 * 7 / 8 / NVLINK
    )


def test_an_axis_between_nodes_shares_the_nics() -> None:
    slow, fast = axis_links((4, 8), A100)  # 8 groups, each with one rank in every node
    assert slow.hops == (hop(1, 4, 1, groups=8),)
    assert fast.hops == (hop(0, 8, 1),)
    assert collective_seconds("all_gather", GB, slow) == pytest.approx(
        3 * NETWORK_LATENCY + 3 / 4 * GB / (NIC / 8)
    )


def test_contention_goes_with_the_groups_that_live_in_a_node() -> None:
    prices = [  # 8 ranks a node in 8 groups, however far apart
        collective_seconds("all_gather", GB, axis_links((4, stride), A100)[0])
        for stride in (8, 16, 32)
    ]
    assert prices == pytest.approx([prices[0]] * 3)
    assert [found.level for found in axis_links((2, 4, 2), A100)[1].hops] == ["nvlink"]


def test_a_ring_over_nodes_keeps_both_levels_busy() -> None:
    """Of the 31 steps of a ring over 4 nodes of 8, three in a row cross the network for each piece;
    every link carries 31 of 32 pieces, so the slower level decides.
    """
    (axis,) = axis_links((32,), A100)
    assert axis.hops == (hop(0, 8, 1), hop(1, 4, 8))
    ring = 28 * LATENCY + 3 * NETWORK_LATENCY + 31 / 32 * GB / min(NVLINK, NIC)
    assert collective_seconds("all_gather", GB, axis) == pytest.approx(ring)
    tree = 7 * LATENCY + 2 * NETWORK_LATENCY + GB / min(NVLINK, NIC)
    assert collective_seconds("all_reduce", GB, axis) == pytest.approx(2 * min(ring, tree))
    assert collective_seconds("all_reduce", 8.0, axis) == pytest.approx(
        2 * (7 * LATENCY + 2 * NETWORK_LATENCY), rel=1e-3
    )
    middle = axis_links((8, 4), A100)[0]  # 2 ranks a node, in 4 groups
    assert middle.hops == (hop(0, 2, 1), hop(1, 4, 2, groups=4))


def test_a_reduce_scatter_over_thousands_of_nodes_takes_the_latency_of_its_ring() -> None:
    """NCCL has no tree for a reduce-scatter: 25 MiB over one rank of each of 2,048 nodes take 2,047
    steps. An all-reduce may take the tree.
    """
    (axis, _) = axis_links((2048, 8), A100)
    steps = 2047 * NETWORK_LATENCY
    assert steps == pytest.approx(0.016, rel=0.03)
    assert collective_seconds("reduce_scatter", 25 * 2**20, axis) == pytest.approx(
        steps + 2047 / 2048 * 25 * 2**20 / (NIC / 8)
    )
    assert collective_seconds("all_reduce", 25 * 2**20, axis) == pytest.approx(
        2 * (11 * NETWORK_LATENCY + 25 * 2**20 / (NIC / 8))
    )


def test_a_long_all_reduce_over_nodes_reaches_the_bandwidth_of_the_slower_level() -> None:
    """Bus bandwidth, 2 (n - 1) / n bytes a second, of 8 GiB over 8 nodes of 8 H100s."""
    (axis,) = axis_links((64,), Cluster.load("h100-sxm"))
    seconds = collective_seconds("all_reduce", 8 * 2.0**30, axis)
    assert 2 * 63 / 64 * 8 * 2.0**30 / seconds == pytest.approx(340e9, rel=0.03)


def test_an_oversubscribed_network_is_a_level_of_its_own() -> None:
    """Racks of 4 nodes whose uplinks carry half of what the nodes' NICs do."""
    network, rack = replace(A100.links[1], size=32), 4 * A100.links[1].bandwidth
    spine = replace(A100.links[1], name="spine", size=None, bandwidth=rack / 2)
    (plain,) = (axis for axis in axis_links((128, 1), A100)[:1])
    (slow,) = (
        axis
        for axis in axis_links((128, 1), replace(A100, links=(A100.links[0], network, spine)))[:1]
    )
    assert plain.bandwidth == pytest.approx(min(NVLINK, NIC))
    assert slow.bandwidth == pytest.approx(min(NVLINK, NIC, 2 * NIC))
    across = [
        axis_links((4, 32), replace(A100, links=links))[0].bandwidth
        for links in (
            (A100.links[0], network, replace(spine, bandwidth=rack)),
            (A100.links[0], network, spine),
        )
    ]
    assert across[0] / across[1] == pytest.approx(2)


def test_jitter_grows_with_the_ranks() -> None:
    shaky = replace(A100, software=replace(A100.software, jitter=1e-5))
    more = [
        collective_seconds("all_gather", GB, axis_links((n,), shaky)[0])
        - collective_seconds("all_gather", GB, axis_links((n,), A100)[0])
        for n in (2, 8, 64)
    ]
    assert more == pytest.approx([1e-5 * math.sqrt(2 * math.log(n)) for n in (2, 8, 64)])


def test_a_kind_of_collective_may_have_figures_of_its_own() -> None:
    own = {"all_gather": CollectiveFigures(startup=23e-6, latency=9e-6, efficiency=0.5)}
    level = replace(A100.links[0], collectives=own)
    (axis,), (plain,) = axis_links((8,), replace(A100, links=(level,))), axis_links((8,), A100)
    assert collective_seconds("all_gather", GB, axis) == pytest.approx(
        23e-6 + 7 * 9e-6 + 7 / 8 * GB / 150e9
    )
    assert collective_seconds("all_reduce", GB, axis) == collective_seconds("all_reduce", GB, plain)


def test_a_table_over_nodes_comes_before_the_formulas() -> None:
    curve = {"all_reduce": {"4x8": ((1e4, 1e-4), (1e6, 1e-3))}}
    links = (A100.links[0], replace(A100.links[1], measured=curve))
    (axis,), (other,) = (axis_links((n,), replace(A100, links=links)) for n in (32, 16))
    assert collective_seconds("all_reduce", 1e5, axis) == pytest.approx(10**-3.5)
    assert collective_seconds("all_reduce", 1e5, other) == collective_seconds(
        "all_reduce", 1e5, axis_links((16,), A100)[0]
    )


def test_ranks_that_straddle_nodes() -> None:
    outer, inner = axis_links((4, 6), A100)  # the second group of 6 holds devices 6 to 11
    assert [found.level for found in inner.hops] == ["nvlink", "network"]
    assert outer.hops[-1].level == "network"


@pytest.mark.parametrize(
    "sizes", [(32,), (4, 8), (8, 4), (2, 16), (16, 2), (4, 4, 2), (2, 8, 2), (64, 1)]
)
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_the_nics_carry_what_the_algorithm_sends(sizes: tuple[int, ...], kind: str) -> None:
    """Counts the bytes that pass into each node, message by message: in a ring from each rank to
    the next, in an all-to-all between all pairs. Without latency and with free links inside nodes,
    the seconds are these bytes over the NICs' bandwidth.
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
            n, nodes = len(group), group // 8
            if kind == "all_gather":
                for node in nodes[nodes != np.roll(nodes, 1)]:
                    into[node] += (n - 1) * GB / n
            else:
                for node in np.unique(nodes):
                    here = int((nodes == node).sum())
                    into[node] += here * (n - here) * GB / n**2
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
    assert [(found.level, found.ways, found.inner) for found in axis.hops] == [
        ("nvlink", 8, 1),
        ("network", 4, 8),
        ("spine", 4, 32),
    ]
    assert axis_links((4, 32), pods)[0].hops == (Hop("spine", 4, 1, True, 2e-5, 400e9 / 32),)


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
