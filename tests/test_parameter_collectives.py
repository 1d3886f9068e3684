"""The one description of the collectives of parameters, which runtime, memory count and cost model
read: the table of types, the buckets, and the kinds and axes that are priced.
"""

from __future__ import annotations

import pytest
import torch

from autopar.cost_model import Cluster, ConversionCosts
from autopar.ir.layout import parse_layout
from autopar.ir.parameter_collectives import (
    BUCKET_BYTES,
    ParameterCollectives,
    ParameterSpec,
    bucket_count,
    gather_order,
    gradient_buckets,
    parameter_collectives,
    unsupported_axis,
)

HALF, SINGLE = torch.bfloat16, torch.float32
# (stored, used, mesh sizes): gathered, exchanged, scattered, reduced
TABLE = {
    ("I", "I", (2,)): ((), (), (), ()),
    ("S0", "S0", (2,)): ((), (), (), ()),
    ("S0", "S0/3", (2,)): ((), (0,), (), ()),
    ("I", "R", (2,)): ((), (), (), (0,)),
    ("S0", "R", (2,)): ((0,), (), (0,), ()),
    ("S1", "I", (2,)): ((0,), (), (), ()),
    ("I S0", "R R", (2, 2)): ((1,), (), (1,), (0,)),
    ("S0 S1", "R S1/3", (2, 2)): ((0,), (1,), (0,), ()),
    ("S0 S0", "R R", (1, 4)): ((1,), (), (1,), ()),
}


def spec(
    name: str, stored: str, used: str, rows: int = 8, dtype: torch.dtype = SINGLE
) -> ParameterSpec:
    layouts = parse_layout(stored), parse_layout(used)
    return ParameterSpec(name, (rows, 12), *layouts, (2, 2), SINGLE, dtype)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_the_collectives_of_each_pair_of_types(row: tuple[str, str, tuple[int, ...]]) -> None:
    stored, used, sizes = parse_layout(row[0]), parse_layout(row[1]), row[2]
    assert parameter_collectives(stored, used, sizes) == ParameterCollectives(*TABLE[row])
    assert unsupported_axis(stored, used, sizes) is None


@pytest.mark.parametrize(
    ("stored", "used", "axis"),
    [("I", "S0", 0), ("S1", "S0", 0), ("I S0", "I S1", 1), ("S0 S0", "R S0", 0)],
)
def test_pairs_that_have_none(stored: str, used: str, axis: int) -> None:
    layouts = parse_layout(stored), parse_layout(used)
    assert unsupported_axis(*layouts, (2,) * len(layouts[0])) == axis


def test_the_order_of_gathers() -> None:
    parameters = [
        spec("whole", "I I", "I I"),
        spec("cast", "I I", "I I", dtype=HALF),
        spec("first", "S0 I", "R I"),
        spec("pieces", "I S0", "I S0/2"),
        spec("second", "S0 I", "R I"),
        spec("both axes", "S0 S0", "R R"),
    ]
    order = gather_order(parameters)
    assert [[p.name for p in b.parameters] for b in order.gathered] == [
        ["first", "second"],
        ["both axes"],
    ]
    assert [p.name for p in order.cast] == ["cast"]
    assert [[p.name for p in b.parameters] for b in order.exchanged] == [["pieces"]]


def test_gradients_fill_buckets_in_reverse_and_up_to_the_limit() -> None:
    parameters = [spec(str(i), "S0 I", "R I", rows) for i, rows in enumerate((8, 8, 8, 32))]
    parameters.insert(2, spec("replicated", "I I", "R I"))
    parameters.append(spec("local", "S0 I", "S0 I"))
    found = gradient_buckets(parameters, bucket_bytes=2 * 8 * 12 * 4)
    assert [[p.name for p in b.parameters] for b in found] == [
        ["3"],
        ["2", "1"],
        ["replicated"],
        ["0"],
    ]
    assert [bucket_count(n) for n in (0, BUCKET_BYTES, BUCKET_BYTES + 1)] == [1, 1, 2]


def test_the_dtype_of_a_bucket() -> None:
    assert spec("a", "I I", "R I", dtype=HALF).bucket_dtype(None) == HALF
    assert spec("a", "I I", "R I", dtype=HALF).bucket_dtype(SINGLE) == SINGLE
    assert spec("a", "S0 I", "I I", dtype=HALF).bucket_dtype(HALF) == SINGLE  # nothing is summed


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_what_is_priced_is_what_runs(row: tuple[str, str, tuple[int, ...]]) -> None:
    """Each axis has the priced collectives of the description. (Of large tensors whose sharded dim
    is not the leading one the cost model may price a cheaper way round.)
    """
    stored, used, sizes = parse_layout(row[0]), parse_layout(row[1]), row[2]
    terms = ConversionCosts(sizes, Cluster.load("a100-sxm")).terms((24, 24), 4, True, stored, used)
    found = {(t.phase, t.kind, t.axis) for t in terms if t.kind != "copy"}
    c = parameter_collectives(stored, used, sizes)
    assert found == {
        *(("forward", "all_gather", axis) for axis in c.gathered),
        *((phase, "all_to_all", axis) for axis in c.exchanged for phase in ("forward", "backward")),
        *(("backward", "reduce_scatter", axis) for axis in c.scattered),
        *(("backward", "all_reduce", axis) for axis in c.reduced),
    }
