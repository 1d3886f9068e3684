"""Options follow from the factors of a rule, and those of a view from its shapes."""

from __future__ import annotations

import math
import random

import pytest
from emulate import Program
from rule_rows.operands import Operands, aten, row
from rule_rows.strategies import some_strategies

from autopar.ir.layout import I, P, R, S
from autopar.rules import Rule, make_rule
from autopar.rules.views import factorise
from autopar.search.space.choices.node_strategies import node_strategies


def _written(rule: Rule) -> set[str]:
    return {f"{' '.join(map(repr, o.ins))} -> {o.out!r}" for o in rule.options()}


def test_options_of_a_linear_layer() -> None:
    rule = make_rule("... k, n k + n -> ... n", [(4, 2, 6), (12, 6), (12,)], (4, 2, 12))
    assert _written(rule) == {
        "I I I -> I", "R R R -> R",
        "P R P -> P", "R P P -> P",  # linear in input and weight, each while the other is fixed
        "S0 R R -> S0", "S1 R R -> S1",  # batch and sequence
        "R S0 S0 -> S2",  # columns
        "S2 S1 P -> P",  # rows: the result is a pending sum, and the bias must be one
    }  # fmt: skip


def test_options_of_a_nonlinear_operator() -> None:
    assert _written(make_rule("~a b -> a b", [(4, 6)], (4, 6), whole="b")) == {
        "I -> I",
        "R -> R",
        "S0 -> S0",
    }


def test_dims_of_size_1_are_broadcast() -> None:
    rule = make_rule("..., ... -> ...", [(4, 1, 6), (2, 1)], (4, 2, 6))
    assert rule.operands == (((".2",), (), (".0",)), ((".1",), ()))
    assert rule.sizes == {".0": 6, ".1": 2, ".2": 4}
    assert "S0 R -> S0" in _written(rule)
    assert "R S0 -> S1" in _written(rule)


def test_an_absent_operand_is_left_out() -> None:
    assert _written(make_rule("k, n k + n -> n", [(6,), (12, 6)], (12,))) >= {
        "S0 S1 -> P",
        "R S0 -> S0",
    }


def test_a_product_is_split_major_factor_first() -> None:
    rule = make_rule("(a b) -> a b", [(24,)], (4, 6))
    found = {str(s) for s in node_strategies(rule, [True], True, (2, 2), lambda *_: True)}
    assert "S0 S0 -> S0 S0" in found
    assert "S0 R -> S1 R" not in found  # b is split, while a is whole
    assert {str(s) for s in node_strategies(rule, [True], True, (4, 2), lambda *_: True)} >= {
        "S0 S0 -> S0 S1"
    }
    assert not any(
        s.out == (S(0), S(0)) for s in node_strategies(rule, [True], True, (4, 2), lambda *_: True)
    )  # 4 is 2 times 2


def test_types_without_gradient_know_no_r() -> None:
    rule = make_rule("~a, a -> a", [(4,), (4,)], (4,))
    found = node_strategies(rule, [False, True], True, (2,), lambda *_: True)
    assert not any(R in s.ins[0] for s in found)
    assert any(s.ins == ((I,), (P,)) for s in found)


def test_a_rule_must_fit_the_shapes() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_rule("a b -> a", [(4, 6, 2)], (4,))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (24,), ("a", "b", "->", "ab")),
        ((24,), (4, 6), ("ab", "->", "a", "b")),
        ((4, 6, 2), (12, 4), ("a", "bc", "d", "->", "ab", "cd")),
        ((4, 1, 6), (1, 4, 6, 1), ("a", "", "b", "->", "", "a", "b", "")),
        ((2, 6, 5), (4, 3, 5), ("a", "bc", "d", "->", "ab", "c", "d")),
        (
            (6, 4, 5),
            (8, 3, 5),
            ("ab", "c", "d", "->", "ae", "f", "d"),
        ),  # 6 and 8 share the factor 2, and no other up to the 5
        ((3, 4), (4, 3), ("a", "b", "->", "c", "d")),
    ],
)
def test_factors_of_views(
    before: tuple[int, ...], after: tuple[int, ...], expected: tuple[str, ...]
) -> None:
    left, right, sizes = factorise(before, after)
    names = dict(zip(dict.fromkeys(x for d in (*left, *right) for x in d), "abcdef", strict=False))
    assert (
        *("".join(names[x] for x in d) for d in left),
        "->",
        *("".join(names[x] for x in d) for d in right),
    ) == expected
    assert [math.prod(sizes[x] for x in d) for d in (*left, *right)] == [*before, *after]


def _shapes(seed: int) -> tuple[list[int], list[int]]:
    """Two shapes with the same number of elements, whose dims need not divide each other."""
    numbers = random.Random(seed)
    primes = numbers.choices((1, 2, 2, 3), k=6)
    result = []
    for _ in range(2):
        numbers.shuffle(primes)
        shape = [1] * numbers.randint(1, 4)
        for p in primes:
            shape[numbers.randrange(len(shape))] *= p
        result.append(shape)
    return result[0], result[1]


@pytest.mark.parametrize("seed", range(30))
def test_any_view_is_right(seed: int) -> None:
    before, after = _shapes(seed)
    if before == after:
        return
    program = Program(row(aten.reshape.default, Operands().n(*before), after))
    for sizes in ((2,), (3,), (4,), (2, 2), (2, 3), (6,)):
        for strategy in some_strategies(program, sizes):
            program.check(strategy, sizes)
