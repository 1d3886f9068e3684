"""The rules by operator. A user's own code may register more: see :func:`register_rule`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.fx as fx

from autopar.capture.function_operator import FunctionOperator
from autopar.errors import PlanError
from autopar.ir.call_keys import CallKeys
from autopar.ir.nodes import arguments, operands, result_tensors
from autopar.rules.rule import Dim, Rule, make_rule

Arguments = dict[str, Any]
RuleMaker = Callable[["OperatorCall"], Rule | None]
Maker = TypeVar("Maker", bound=RuleMaker)

ANY_FUNCTION = "torch.autograd.Function"  # of which a subclass has no rule of its own

_OWN = ("autopar.rules.", "autopar.passes.")  # the modules whose makers are autopar's
_MAKERS: dict[str, RuleMaker] = {}


class OperatorCall:
    """One call of an operator, as the maker of a rule sees it.

    Attributes:
        node: the node of the graph.
        name: the operator's name, such as ``"aten.linear"``.
        inputs: the nodes of the tensor operands.
        shapes: the global shape of each operand.
        shape: the global shape of the result; of the first result, if there are several.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.name = operator_name(node.target)
        self.inputs = [n for n, _ in operands(node)]
        self.shapes = [tuple(result_tensors(n)[0].shape) for n in self.inputs]
        self.shape = tuple(result_tensors(node)[0].shape)
        self._arguments: Arguments | None = None

    @property
    def arguments(self) -> Arguments:
        """The arguments by name, with defaults."""
        if self._arguments is None:
            self._arguments = arguments(self.node)
        return self._arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dims(self, name: str, ndim: int | None = None) -> list[int]:
        """The argument ``name`` as non-negative dims of a tensor with ``ndim`` dims, by default of
        the first operand; all dims if the call names none.
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
    decorated function returns for a call.

    The name of a ``torch.autograd.Function`` consists of its package and its class:
    ``"mypackage.MyFunction"`` for ``mypackage.layers.MyFunction``, ``"__main__.MyFunction"`` in a
    script. Its arguments have the names of the forward's parameters, without the context.

    The function may return None for a call that its rule does not cover. That call then runs
    unsplit. A later registration of a name replaces an earlier one.

    Raises:
        PlanError: no name is given, a name is no text, or the decorated object is not callable.
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


def registered_makers() -> dict[str, RuleMaker]:
    """The makers of all rules, by the operator's name."""
    return dict(_MAKERS)


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call; None if it has none.

    If an operator has several results, all lie in the layout of the first one. Its rule splits only
    dims that all results have.
    """
    if node.op != "call_function" or not (tensors := result_tensors(node)):
        return None
    if any(
        t.layout is not torch.strided
        for n in (node, *node.all_input_nodes)
        for t in result_tensors(n)
    ):
        return None  # a sparse tensor cannot be split
    if node.target is operator.getitem:
        return _rule_of_getitem(node.args[0], len(tensors[0].shape))  # type: ignore[arg-type]
    maker = _maker_of(node)
    if maker is None or not all(result_tensors(n) for n, _ in operands(node)):
        return None
    rule = _call_maker(maker, node)
    if rule is None or isinstance(node.meta["val"], torch.Tensor):
        return rule
    return _for_all_results(rule, tensors)


def rules_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Rule | None]:
    """The rules of the calls among ``nodes``. Equal calls share a rule, except where a user's code
    makes the rule, which may read more of a node.
    """
    keys, made = CallKeys(), dict[Any, Rule | None]()
    found: dict[fx.Node, Rule | None] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target is operator.getitem else node
        if not _is_made_here(source):
            found[node] = rule_of(node)
            continue
        key = keys.of(node), None if source is node else keys.of(source)  # type: ignore[arg-type]
        if key not in made:
            made[key] = rule_of(node)
        found[node] = made[key]
    return found


def _is_made_here(source: Any) -> bool:
    """Whether the rule of a call is autopar's own, or there is none."""
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    if source.target is operator.getitem:
        return False
    maker = _maker_of(source)
    return maker is None or maker.__module__.startswith(_OWN)


def has_rule(node: fx.Node) -> bool:
    """Whether the operator of a call has a rule; the rule may still not cover the call."""
    return _maker_of(node) is not None


def _maker_of(node: fx.Node) -> RuleMaker | None:
    """The maker of a call's rule; None if its operator has no rule."""
    maker = _MAKERS.get(operator_name(node.target))
    if maker is None and isinstance(node.target, FunctionOperator):
        return _MAKERS.get(ANY_FUNCTION)
    return maker


def _call_maker(maker: RuleMaker, node: fx.Node) -> Rule | None:
    """The rule that a maker returns for a call. An error means that a rule of autopar does not
    cover the call. An error in a user's maker is raised, because the user should see it.
    """
    try:
        return maker(OperatorCall(node))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        if not maker.__module__.startswith(_OWN):
            raise
        return None


def _for_all_results(rule: Rule, tensors: Sequence[torch.Tensor]) -> Rule:
    """The rule of an operator's first result, without the options that do not hold for its other
    results.
    """
    first, *others = (t.shape for t in tensors)
    common = {d for d, n in enumerate(first) if all(d < len(s) and s[d] == n for s in others)}
    split = {f for d, factors in enumerate(rule.output) for f in factors if d in common}
    return replace(rule, terms=(), whole=rule.whole | (rule.sizes.keys() - split), extra=())


def _rule_of_getitem(source: fx.Node, ndim: int) -> Rule | None:
    """The rule of taking one result of ``source``, which is split as all results are."""
    if (rule := rule_of(source)) is None:
        return None
    dims: list[Dim] = [tuple(f for f in factors if f not in rule.whole) for factors in rule.output]
    sizes = {f: rule.sizes[f] for factors in dims for f in factors}
    return Rule((tuple(dims),), tuple(dims[:ndim]) + ((),) * (ndim - len(dims)), sizes, kind="view")


def operator_name(target: Any) -> str:
    """``aten.linear`` for any overload of it; for a Python function its package and name, such as
    ``autopar.cross_entropy``.
    """
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return schema.name.replace("::", ".")
    package = getattr(target, "__module__", "").split(".")[0]
    return f"{package}.{getattr(target, '__name__', target)}"
