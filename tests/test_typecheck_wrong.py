"""The independent type check rejects wrong programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from typed_programs import Program, fake_group

from autopar.errors import RunError

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with fake_group():
        yield


def wrong_contraction(p: Program) -> None:
    """The pending sum over the split features is never reduced."""
    x, w = p.input((8, 4), "S1"), p.input((16, 4), "S1", True)
    p.check(p.call(aten.linear.default, x, w), outputs="I")


def wrong_claim(p: Program) -> None:
    """As above, but the node claims to be whole."""
    x, w = p.input((8, 4), "S1"), p.input((16, 4), "S1", True)
    p.check(p.call(aten.linear.default, x, w, layout="I"))


def wrong_sum(p: Program) -> None:
    """A pending sum added to a whole tensor."""
    p.check(p.call(aten.add.Tensor, p.input((8, 4), "I", True), p.input((8, 4), "P", True)))


def wrong_bias(p: Program) -> None:
    """A bias added on each rank, before the sum over ranks."""
    p.check(
        p.call(
            aten.linear.default,
            p.input((8, 4), "S1"),
            p.input((16, 4), "S1", True),
            p.input((16,), "R", True),
        )
    )


def wrong_nonlinear(p: Program) -> None:
    """A nonlinear function of a pending sum."""
    p.check(p.call(aten.gelu.default, p.input((8, 4), "P", True)))


def wrong_parameter(p: Program) -> None:
    """A split batch with a parameter whose gradient is never summed."""
    p.check(p.call(aten.linear.default, p.input((2, 16), "S0"), p.input((4, 16), "I", True)))


def wrong_source(p: Program) -> None:
    """A conversion from a type that its operand does not have."""
    p.check(p.to(p.input((8, 4), "S0", True), 0, "S1", "R"))


def wrong_normalisation(p: Program) -> None:
    """Layer norm over a part of the features."""
    p.check(p.call(aten.layer_norm.default, p.input((8, 4), "S1", True), [4]))


def wrong_view(p: Program) -> None:
    """A view that merges a split dim into the one before it."""
    p.check(p.call(aten.view.default, p.input((8, 4), "S1", True), [32]))


def wrong_mean(p: Program) -> None:
    """A mean of the part instead of the whole."""
    p.check(p.call(aten.mean.dim, p.input((8, 4), "S1", True), [1]))


def wrong_attention(p: Program) -> None:
    """Attention over a part of the keys."""
    q, k = p.input((2, 2, 8, 4), "R", True), p.input((2, 2, 2, 4), "S2", True)
    p.check(p.call(aten.scaled_dot_product_attention.default, q, k, k))


def wrong_batch_norm(p: Program) -> None:
    """Statistics of a part of the batch."""
    x, scale, stats = p.input((2, 4, 8), "S0", True), p.input((4,), "R", True), p.input((4,), "I")
    p.check(p.call(aten.batch_norm.default, x, scale, scale, stats, stats, True, 0.1, 1e-5, False))


def wrong_product(p: Program) -> None:
    """A product of two pending sums."""
    p.check(p.call(aten.mul.Tensor, p.input((8, 4), "P", True), p.input((8, 4), "P", True)))


WRONG = [f for name, f in list(globals().items()) if name.startswith("wrong_")]


@pytest.mark.parametrize("program", WRONG, ids=lambda f: f.__name__)
def test_rejects(program: object) -> None:
    with pytest.raises(RunError) as caught:
        program(Program(4))  # type: ignore[operator]
    message = str(caught.value)
    assert "is claimed" in message or "do not check" in message
    if program not in (wrong_contraction,):
        assert "model.layers.0, model.py:7" in message


@pytest.mark.parametrize(("layout", "src", "dst"), [("S0 S0", "S0", "R"), ("I S0", "I", "S0")])
def test_rejects_converting_the_major_axis_under_a_minor_one(
    layout: str, src: str, dst: str
) -> None:
    p = Program(2, 2)
    with pytest.raises(RunError, match="do not check"):
        p.check(p.to(p.input((2, 4), layout, True), 0, src, dst))


def test_a_part_of_what_is_cut_as_one_is_refused() -> None:
    p = Program(4)
    p.call(aten.slice.Tensor, p.input((2, 8, 12), "S2", True), 2, 0, 4)
    with pytest.raises(RunError, match="do not check"):
        p.check()
    p = Program(4)
    # A third of a dim of which each half is cut.
    p.call(aten.slice.Tensor, p.input((2, 8, 12), "S2/2", True), 2, 0, 4)
    with pytest.raises(RunError, match="do not check"):
        p.check()
    p = Program(4)
    third = p.call(aten.slice.Tensor, p.input((2, 8, 12), "S2/3", True), 2, 4, 8)
    p.check(third, outputs="S2")


def test_operands_in_different_orders_are_refused() -> None:
    p = Program(4)
    p.call(aten.add.Tensor, p.input((2, 8, 12), "S2/3", True), p.input((2, 8, 12), "S2", True))
    with pytest.raises(RunError, match="different orders"):
        p.check()
