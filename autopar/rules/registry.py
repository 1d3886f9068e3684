"""Which rule an operator has. A user's own code may register more: see :func:`register_rule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from autopar.graph import arguments, operands
from autopar.rules.rule import Rule, make_rule

Arguments = dict[str, Any]
RuleMaker = Callable[["Call"], Rule | None]

_MAKERS: dict[str, RuleMaker] = {}


class Call:
    """One call of an operator, as a rule sees it: arguments by name, and the shapes of tensor operands and output."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.name = operator_name(node.target)
        self.inputs = [n for n, _ in operands(node)]
        self.shapes = [tuple(n.meta["val"].shape) for n in self.inputs]
        self.shape = tuple(node.meta["val"].shape)
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
        """The argument ``name`` as non-negative dims of an operand (the first's, or of one with ``ndim``); all if none is given."""
        value, n = self.arguments.get(name), len(self.shapes[0]) if ndim is None else ndim
        if value is None or value == []:
            return list(range(n))
        return [d % max(n, 1) for d in ([value] if isinstance(value, int) else value)]

    def rule(self, spec: str, **options: Any) -> Rule:
        """:func:`make_rule` with this call's shapes."""
        return make_rule(spec, self.shapes, self.shape, **options)


def register_rule(*names: str) -> Callable[[RuleMaker], RuleMaker]:
    """Give the operators called ``names`` (``"aten.linear"``, ``"mylib.op"``) the rule that the decorated function makes of a call.

    The function may return None for a call that its rule does not cover: that call then runs unsplit. A later registration of a
    name replaces an earlier one.
    """

    def register(maker: RuleMaker) -> RuleMaker:
        for name in names:
            _MAKERS[name] = maker
        return maker

    return register


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call with one tensor as its output; None where there is none."""
    if node.op != "call_function" or not hasattr(node.meta.get("val"), "shape"):
        return None
    maker = _MAKERS.get(operator_name(node.target))
    return maker(Call(node)) if maker else None


def operator_name(target: Any) -> str:
    """``aten.linear`` for any overload of it; package and name of a Python function: ``autopar.cross_entropy``."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return schema.name.replace("::", ".")
    package = getattr(target, "__module__", "").split(".")[0]
    return f"{package}.{getattr(target, '__name__', target)}"
