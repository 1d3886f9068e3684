"""Rules against torch: the operands of each operator are cut as each option says, the operator runs
on the parts, and the joined results are compared with the operator on the whole operands.
"""

from __future__ import annotations

import pytest
from emulate import Program, Row
from rule_rows import MORE, ROWS
from rule_rows.operands import Operands, aten, row
from rule_rows.strategies import STRATEGIES, some_strategies

from autopar.rules.registry import _MAKERS, ANY_FUNCTION

MESHES = ((2,), (3,), (2, 2))
# these need kernels: see tests/test_kernels.py and tests/test_random_operators.py
DRAWN = {"aten.dropout"} | {
    name for name, maker in _MAKERS.items() if maker.__module__ == "autopar.rules.random"
}

UNDEFINED = {"aten.empty", "aten.new_empty", "aten.empty_like"}  # any values are right
UNDEFINED |= {"aten.randperm"}  # it is random, but stays whole


@pytest.mark.parametrize(
    ("example", "meshes"),
    [
        *((r, dict.fromkeys(MESHES, STRATEGIES)) for r in ROWS),
        *((r, {(2,): STRATEGIES, (2, 2): 3}) for r in MORE),
    ],
    ids=lambda given: str(given) if isinstance(given, Row) else "",
)
def test_every_option_is_the_operator(example: Row, meshes: dict[tuple[int, ...], int]) -> None:
    program = Program(example)
    assert program.rule is not None
    for sizes, at_most in meshes.items():
        for strategy in some_strategies(program, sizes, at_most):
            try:
                program.check(strategy, sizes)
            except Exception as e:
                raise AssertionError(f"{example.name}: {strategy} on {sizes}: {e}") from e


def test_sparse_tensors_are_not_split() -> None:
    numbers = Operands()
    assert Program(row(aten.mul.Tensor, numbers.n(4, 6).to_sparse(), numbers.n(4, 6))).rule is None


def test_every_rule_has_a_row() -> None:
    # The rules of some operators are in tests/program_parts.py; those that are made from a
    # Function's own operators are in test_function_rules.py.
    ours = {name for name in _MAKERS if not name.startswith("program_parts.")} - {ANY_FUNCTION}
    assert {r.name for r in (*ROWS, *MORE)} | DRAWN | UNDEFINED == ours
