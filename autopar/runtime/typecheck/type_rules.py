"""The registry of type rules: what the checker knows of each operator, as a function that types a
call.

The rules stand in the files ``type_rules_*.py``. They are written independently of
``autopar.rules`` on purpose, so that a mistake in either shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.layout import Layout


@dataclass(frozen=True)
class TypedCall:
    """One call that a rule types.

    Attributes:
        target: the function or operator.
        args: the positional arguments, with typed tensors.
        kwargs: the keyword arguments, likewise.
        out: the result, untyped.
        claim: the layout that the graph claims for the result, if it claims one.
        axes: the mesh axes, as ``spmd_types`` knows them.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    claim: Layout | None
    axes: tuple[Any, ...]

    def claimed(self) -> dict[Any, int]:
        """The dim that each axis cuts according to the graph's claim."""
        return {
            axis: t.dim
            for axis, t in zip(self.axes, self.claim or (), strict=False)
            if t.is_shard and axis.size() > 1
        }

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """An argument by place or by name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def operator_name(self) -> str:
        """The name of an aten operator."""
        name: str = self.target._schema.name.removeprefix("aten::")
        return name

    @property
    def has_several_results(self) -> bool:
        """Whether the call returns several tensors."""
        return isinstance(self.out, (tuple, list))


TypeRule = Callable[[TypedCall], Any]
_RULES: dict[Any, TypeRule] = {}


def type_rule(*targets: Any) -> Callable[[TypeRule], TypeRule]:
    """Registers the rule of calls of ``targets``: functions, names of aten operators, or
    ``torch.Tag.pointwise``, whose rule serves all operators with this tag that have no other rule.
    """

    def register(rule: TypeRule) -> TypeRule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def find_rule(target: Any) -> TypeRule | None:
    """The rule of a call_function node's target; None if it has no rule."""
    if not isinstance(target, torch._ops.OpOverload):
        return _RULES.get(target)
    tag = torch.Tag.pointwise
    by_name = _RULES.get(target._schema.name.removeprefix("aten::"))
    return by_name or (_RULES.get(tag) if tag in target.tags else None)
