"""The independent type check accepts right programs and rejects wrong ones, in one process."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from typed_programs import Program, fake_group

from autopar.errors import RunError
from autopar.runtime.kernels import graph_kernels

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with fake_group():
        yield


def test_accepts_megatron_mlp() -> None:
    p = Program(4)
    x, w1, b1, w2 = (
        p.input((2, 8, 16), "I", True),
        p.input((8, 16), "S0", True),
        p.input((8,), "S0", True),
        p.input((16, 8), "S1", True),
    )
    h = p.call(aten.gelu.default, p.call(aten.linear.default, p.to(x, 0, "I", "R"), w1, b1))
    y = p.to(p.call(aten.linear.default, h, w2), 0, "P", "I")
    p.check(p.call(aten.add.Tensor, x, y), outputs="I")


def test_accepts_sequence_parallel_mlp() -> None:
    p = Program(4)
    x, scale = p.input((2, 2, 16), "S1", True), p.input((16,), "R", True)
    w1, w2 = p.input((8, 16), "S0", True), p.input((16, 8), "S1", True)
    normed = p.call(aten.layer_norm.default, x, [16], scale)
    h = p.call(aten.silu.default, p.call(aten.linear.default, p.to(normed, 0, "S1", "R"), w1))
    y = p.to(p.call(aten.linear.default, h, w2), 0, "P", "S1")
    p.check(p.call(aten.add.Tensor, x, y), outputs="S1")


def test_accepts_data_parallel_loss() -> None:
    p = Program(2, 2)
    x, target = p.input((8, 16), "I I"), p.input((8,), "I I", dtype=torch.int64)
    w, b = p.input((10, 16), "I R", True), p.input((10,), "R R", True)
    for axis in (0, 1):
        x, target = p.to(x, axis, "I", "S0"), p.to(target, axis, "I", "S0")
    logits = p.call(aten.linear.default, x, p.to(w, 0, "I", "R"), b)
    count = p.call(graph_kernels.target_count, target)
    for axis in (1, 0):
        count = p.to(count, axis, "P", "I")
    loss = p.call(aten.div.Tensor, p.call(graph_kernels.cross_entropy, logits, target), count)
    p.check(p.to(p.to(loss, 1, "P", "I"), 0, "P", "I"), logits, outputs="I I,S0 S0")


@pytest.mark.parametrize("local_heads", [1, 2])
def test_accepts_attention_split_by_heads_and_batch(local_heads: int) -> None:
    p = Program(2, 2)
    width = local_heads * 4
    x = p.input((2, 8, 16), "S0 R", True)
    parts = []
    for _ in range(3):
        flat = p.call(aten.linear.default, x, p.input((width, 16), "R S0", True))
        heads = p.call(aten.view.default, flat, [2, 8, local_heads, 4], layout="S0 S2")
        parts.append(p.call(aten.transpose.int, heads, 1, 2))
    mask = p.call(
        aten.expand.default,
        p.input((1, 1, 8, 8), "I I", dtype=torch.bool),
        [2, 1, 8, 8],
        layout="S0 R",
    )
    out = p.call(aten.scaled_dot_product_attention.default, *parts, mask)
    flat = p.call(aten.view.default, p.call(aten.transpose.int, out, 1, 2), [2, 8, width])
    y = p.call(aten.linear.default, flat, p.input((16, width), "R S1", True))
    p.check(p.to(y, 1, "P", "R"), outputs="S0 R")


def test_accepts_dropout_of_a_pending_sum() -> None:
    p = Program(2, 2)
    x = p.input((4, 8), "S0 P", True)
    p.check(
        p.to(p.call(graph_kernels.dropout, x, 0.1, True, p.mesh, 3, (0,)), 1, "P", "I"),
        outputs="S0 I",
    )


def test_accepts_split_vocabulary() -> None:
    p = Program(2, 2)
    ids, table = p.input((4, 8), "I I", dtype=torch.int64), p.input((8, 16), "S0 S0", True)
    rows = p.call(
        graph_kernels.embedding_vocabulary, table, ids, None, False, False, p.mesh, (0, 1)
    )
    for axis in (1, 0):
        rows = p.to(rows, axis, "P", "R")
    logits = p.call(aten.linear.default, rows, table)
    p.check(
        p.call(
            graph_kernels.cross_entropy_vocabulary, logits, ids, None, -100, 0.0, p.mesh, (0, 1)
        ),
        outputs="I I",
    )


def test_accepts_a_row_expanded_to_one_for_each_rank() -> None:
    p = Program(4)
    row = p.input((1, 8), "R", dtype=torch.int64)
    p.check(p.call(aten.expand.default, row, [1, 8], layout="S0"), outputs="S0")


def test_gathers_by_indices_that_are_cut() -> None:
    p = Program(4)
    table, ids = p.input((4, 8), "R", dtype=torch.int64), p.input((4, 3), "S1", dtype=torch.int64)
    p.check(p.call(aten.gather.default, table, 1, ids), outputs="S1")
    p = Program(4)
    table, ids = p.input((4, 8), "S1", dtype=torch.int64), p.input((4, 3), "R", dtype=torch.int64)
    with pytest.raises(RunError, match="must not be sharded"):
        p.check(p.call(aten.gather.default, table, 1, ids))


def test_scatters_a_pending_sum_only_into_one() -> None:
    for into, legal in (("P", True), ("R", False)):
        p = Program(4)
        x, ids, source = (
            p.input((4, 8), into, True),
            p.input((4, 3), "R", dtype=torch.int64),
            p.input((4, 3), "P", True),
        )
        result = p.call(aten.scatter_add.default, x, 1, ids, source)
        if legal:
            p.check(result, outputs="P")
        else:
            with pytest.raises(RunError, match="scatter_add"):
                p.check(result)


def test_accepts_means_and_norms_of_split_features() -> None:
    p = Program(2, 2)
    x, w = p.input((2, 8, 4), "S0 S2", True), p.input((4,), "R S0", True)
    normed = p.call(graph_kernels.layer_norm_features, x, 1, w, None, 1e-5, p.mesh, (1,))
    square = p.call(aten.pow.Tensor_Scalar, normed, 2)
    mean = p.to(p.call(graph_kernels.partial_mean, square, [-1], True, 8), 1, "P", "R")
    p.check(p.call(aten.mul.Tensor, normed, p.call(aten.rsqrt.default, mean)), outputs="S0 S2")


def test_accepts_split_batch_norm_and_convolution() -> None:
    p = Program(2, 2)
    x, w, scale = (
        p.input((2, 3, 8, 8), "S0 R"),
        p.input((4, 3, 3, 3), "R S0", True),
        p.input((4,), "R S0", True),
    )
    stats = p.input((4,), "I S0"), p.input((4,), "I S0")
    y = p.call(aten.conv2d.default, x, w, None, [1, 1], [1, 1])
    p.check(
        p.call(
            graph_kernels.sync_batch_norm, y, scale, scale, *stats, True, 0.1, 1e-5, p.mesh, (0,)
        ),
        outputs="S0 S1",
    )


def test_accepts_every_conversion_and_one_rank_axes() -> None:
    p = Program(4, 1)
    x = p.input((8, 8), "I I", True)
    for src, dst in ("IR", "RI", "IP", "PR", "RP", "PI", "I0", "01", "1P", "P0", "0R", "R1", "1I"):
        x = p.to(x, 0, *(f"S{t}" if t.isdigit() else t for t in (src, dst)))
    p.check(p.to(x, 1, "I", "S0"), outputs="I S0")


def test_asks_dtensor_for_an_operator_without_a_rule() -> None:
    p = Program(4)
    values = p.call(operator.getitem, p.call(aten.max.dim, p.input((2, 8, 8), "S0", True), 1), 0)
    assert p.check(values, outputs="S0") == []


def test_trusts_the_claim_where_nobody_knows_the_operator() -> None:
    p = Program(4)
    node = p.call(aten.linalg_inv.default, p.input((2, 8, 8), "S0", True), layout="S0")
    assert p.check(node, outputs="S0") == [node.name]


def test_heads_of_parts() -> None:
    p = Program(4)
    heads = p.call(aten.view.default, p.input((2, 8, 12), "S2/3", True), [2, 8, 3, 2, 2])
    p.check(heads, outputs="S3")


@pytest.mark.parametrize("dst", ["P", "R"])
def test_a_conversion_leaves_the_cuts_of_other_dims_as_they_are(dst: str) -> None:
    """Also where the first axis cuts within the chunks of a later one."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8)
    p = Program(2, 2, 2)
    p.check(p.to(p.input((16, 32), "S0 s1 S1", True), 0, "S0", dst), outputs=f"{dst} s1 S1")
    q = Program(2, 2, 2)
    with pytest.raises(RunError, match="later axis"):
        q.check(q.to(q.input((16, 32), "I s1 S0", True), 0, "I", "S0"))
