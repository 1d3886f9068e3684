"""The rule of a ``torch.autograd.Function``, from the rules of the operators in its forward and its
backward, which are traced on tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch.fx as fx
from torch.fx.node import map_arg

from autopar.errors import PlanError
from autopar.ir.nodes import describe_node, result_tensors
from autopar.passes.canonical.function_types import (
    Cut,
    FunctionTypes,
    Shapes,
    operand_shapes,
    result_shapes,
)
from autopar.rules.registry import (
    ANY_FUNCTION,
    OperatorCall,
    RuleMaker,
    operator_name,
    register_rule,
    registered_makers,
)
from autopar.rules.rule import Dim, Rule

T = TypeVar("T")

_MAX_KEPT = 512
_kept: dict[Hashable, Any] = {}  # rules, and whether chunks are computed alike, by call
_kept_of: dict[str, RuleMaker] = {}  # the makers of all rules, when these were made


def _once(key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returns, kept for equal calls while the makers of rules stay the same."""
    if (makers := registered_makers()) != _kept_of or len(_kept) == _MAX_KEPT:
        _kept.clear()
        _kept_of.clear()
        _kept_of.update(makers)
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]  # type: ignore[no-any-return]


def _key(call: fx.Node) -> Hashable:
    """What the operators of a call depend on."""
    given = map_arg(call.args, lambda n: str(n.meta["val"].dtype))
    return call.target, repr(given), _tuples(operand_shapes(call)), _tuples(result_shapes(call))


def _tuples(shapes: Shapes) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, shapes))


@register_rule(ANY_FUNCTION)
def function(call: OperatorCall) -> Rule | None:
    """None where the Function cannot be traced without data."""
    return _once(("rule", _key(call.node)), lambda: _made(call))


def _made(call: OperatorCall) -> Rule | None:
    if call.node.target.random:  # type: ignore[union-attr]
        return None  # all ranks must draw the same numbers
    try:
        types = FunctionTypes(call.node)
    except Exception:  # whatever the user's code raises without data
        return None
    return _rule(call, types, types.cuts())


def check_function(call: fx.Node, shapes: Shapes, results: Shapes) -> None:
    """Check that a Function whose rule was made here calls the same operators with the same numbers
    on chunks as on its own operands.

    Args:
        shapes, results: those of the chunks.

    Raises:
        PlanError: it does not; with what to write instead.
    """
    if operator_name(call.target) in registered_makers():
        return
    key = "chunks", _key(call), _tuples(shapes), _tuples(results)
    if not _once(key, lambda: FunctionTypes(call).has_same_calls(shapes, results)):
        raise PlanError(
            f"{describe_node(call)} calls other operators on chunks of the shapes "
            f"{[tuple(s) for s in shapes]} than on whole tensors, so that the rule that was made "
            "from these does not hold: give it one with register_rule, or let it compute alike at "
            "every size"
        )


def _rule(call: OperatorCall, types: FunctionTypes, cuts: Sequence[Cut]) -> Rule:
    """The rule with a factor for each cut, and one that stays whole for each other dim."""
    results = result_tensors(call.node)
    names = {
        (kind, k, d): f"f{number}"
        for number, cut in enumerate(cuts)
        for kind, dims in (("operand", cut.operands), ("result", cut.results))
        for k, d in enumerate(dims)
        if d is not None
    }

    def dims(kind: str, k: int, shape: Sequence[int]) -> tuple[Dim, ...]:
        named = (names.get((kind, k, d), f"{kind}{k}_{d}") for d in range(len(shape)))
        return tuple(() if n == 1 else (name,) for n, name in zip(shape, named, strict=True))

    ins = tuple(dims("operand", k, shape) for k, shape in enumerate(call.shapes))
    out = dims("result", 0, results[0].shape)
    sizes = {
        dim[0]: n
        for shape, of_tensor in zip((*call.shapes, call.shape), (*ins, out), strict=True)
        for n, dim in zip(shape, of_tensor, strict=True)
        if dim
    }
    split = {f"f{number}" for number in range(len(cuts))}
    sums = frozenset(f"f{i}" for i, cut in enumerate(cuts) if set(cut.results) == {None})
    return Rule(
        ins,
        out,
        sizes,
        whole=frozenset(sizes.keys() - split),
        sums=sums,
        # With a sum over a factor, a term that lacks the factor would have to be a sum, too.
        terms=() if sums or not types.linear_operands else (types.linear_operands,),
        flops=types.flops,
        complete_gradient=not types.is_backward_linear,
    )
