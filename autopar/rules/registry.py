"""Which rule an operator has. A user's own code may register more: see :func:`register_rule`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.nodes import arguments, operands, result_tensors
from autopar.rules.rule import Dim, Rule, make_rule

Arguments = dict[str, Any]
RuleMaker = Callable[["OperatorCall"], Rule | None]
Maker = TypeVar("Maker", bound=RuleMaker)

_MAKERS: dict[str, RuleMaker] = {}


class OperatorCall:
    """One call of an operator, as a rule sees it: arguments by name, and the shapes of tensor
    operands and output (the first one of several)."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.name = operator_name(node.target)
        self.inputs = [n for n, _ in operands(node)]
        self.shapes = [tuple(result_tensors(n)[0].shape) for n in self.inputs]
        self.shape = tuple(result_tensors(node)[0].shape)
        self._arguments: Arguments | None = None

    @property
    def arguments(self) -> Arguments:
        """The arguments by name, defaults filled in."""
        if self._arguments is None:
            self._arguments = arguments(self.node)
        return self._arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dims(self, name: str, ndim: int | None = None) -> list[int]:
        """The argument ``name`` as non-negative dims of an operand (the first's, or of one with
        ``ndim``); all if none is given.
        """
        value, n = self.arguments.get(name), len(self.shapes[0]) if ndim is None else ndim
        if value is None or value == []:
            return list(range(n))
        return [d % max(n, 1) for d in ([value] if isinstance(value, int) else value)]

    def rule(self, spec: str, **options: Any) -> Rule:
        """:func:`make_rule` with this call's shapes."""
        return make_rule(spec, self.shapes, self.shape, **options)


def register_rule(*names: str) -> Callable[[Maker], Maker]:
    """Give the operators called ``names`` (``"aten.linear"``, ``"mylib.op"``) the rule that the
    decorated function makes of a call.

    A ``torch.autograd.Function`` goes by its package and its class: ``"mypackage.MyFunction"`` for
    ``mypackage.layers.MyFunction``, ``"__main__.MyFunction"`` in a script. Arguments have the names
    of its forward, without the context.

    The function may return None for a call that its rule does not cover: that call then runs
    unsplit. A later registration of a name replaces an earlier one.

    Raises:
        PlanError: there is no name, one is no text, or what is decorated cannot be called.
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(
            f"register_rule({', '.join(map(repr, names))}): give the names of operators, for "
            'example "aten.linear"'
        )

    def register(maker: Maker) -> Maker:
        if not callable(maker):
            raise PlanError(
                f"register_rule({names[0]!r}) decorates {maker!r:.100}: write a function that "
                "makes the rule of a call"
            )
        for name in names:
            _MAKERS[name] = maker
        return maker

    return register


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call; None where there is none.

    All results of an operator with several lie in one layout, that of the first: what is split is a
    dim that all of them have.
    """
    if node.op != "call_function" or not (tensors := result_tensors(node)):
        return None
    if any(
        t.layout is not torch.strided
        for n in (node, *node.all_input_nodes)
        for t in result_tensors(n)
    ):
        return None  # nothing cuts a sparse tensor
    if node.target is operator.getitem:
        return _one_result(node.args[0], len(tensors[0].shape))  # type: ignore[arg-type]
    maker = _MAKERS.get(operator_name(node.target))
    rule = (
        _made(maker, node) if maker and all(result_tensors(n) for n, _ in operands(node)) else None
    )
    return (
        rule
        if rule is None or isinstance(node.meta["val"], torch.Tensor)
        else _of_all(rule, tensors)
    )


def has_rule(node: fx.Node) -> bool:
    """Whether there is a rule for calls of this operator."""
    return operator_name(node.target) in _MAKERS


def _made(maker: RuleMaker, node: fx.Node) -> Rule | None:
    """What a maker says of a call. A rule of ours that was not written for a call is none; of a
    user's they should hear.
    """
    try:
        return maker(OperatorCall(node))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        if not maker.__module__.startswith("autopar.rules."):
            raise
        return None


def _of_all(rule: Rule, tensors: Sequence[torch.Tensor]) -> Rule:
    """The rule of an operator's first result, left with what holds for the others too."""
    first, *others = (t.shape for t in tensors)
    common = {d for d, n in enumerate(first) if all(d < len(s) and s[d] == n for s in others)}
    split = {f for d, factors in enumerate(rule.output) for f in factors if d in common}
    return replace(rule, terms=(), whole=rule.whole | (rule.sizes.keys() - split), extra=())


def _one_result(source: fx.Node, ndim: int) -> Rule | None:
    """The rule of taking one result: cut as all of them are."""
    if (rule := rule_of(source)) is None:
        return None
    dims: list[Dim] = [tuple(f for f in factors if f not in rule.whole) for factors in rule.output]
    sizes = {f: rule.sizes[f] for factors in dims for f in factors}
    return Rule((tuple(dims),), tuple(dims[:ndim]) + ((),) * (ndim - len(dims)), sizes, kind="view")


def operator_name(target: Any) -> str:
    """``aten.linear`` for any overload of it; package and name of a Python function:
    ``autopar.cross_entropy``.
    """
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return schema.name.replace("::", ".")
    package = getattr(target, "__module__", "").split(".")[0]
    return f"{package}.{getattr(target, '__name__', target)}"
