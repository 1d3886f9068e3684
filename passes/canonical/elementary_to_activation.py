"""Write an activation that a model spells out in elementary operators as the one operator it is.

GPT-2 of transformers computes its GELU with a power, a tanh and six products and sums. Eager
kernels read and write each result, and autograd saves four of them. ``gelu`` is one kernel that
saves its operand. Both agree up to rounding.

Such an activation is a polynomial of x and of a gate, where the gate is tanh, erf or sigmoid of
another polynomial of x. Two ways to write it are equal where the polynomials are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.ops import aten

from autopar.ir.nodes import replace_node, substitute

# The coefficient of each product, by the powers of x and of the gate.
Polynomial = dict[tuple[int, int], float]

DEEPEST = 8  # calls between x and the gate, or between the gate and the result
LARGEST_POWER = 4
_CUBIC = math.sqrt(2 / math.pi)


class Activation(NamedTuple):
    """An activation of x.

    Attributes:
        gate: the polynomial of x that the gate is computed of.
        result: the polynomial of x and of the gate.
        operator: the operator that computes the same, with its options.
    """

    gate: Polynomial
    result: Polynomial
    operator: Any
    options: Mapping[str, Any]


_HALF_GATED: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}  # x (1 + gate) / 2
ACTIVATIONS = {
    aten.tanh.default: Activation(
        {(1, 0): _CUBIC, (3, 0): 0.044715 * _CUBIC},
        _HALF_GATED,
        aten.gelu.default,
        {"approximate": "tanh"},
    ),
    aten.erf.default: Activation({(1, 0): math.sqrt(0.5)}, _HALF_GATED, aten.gelu.default, {}),
    aten.sigmoid.default: Activation({(1, 0): 1.0}, {(1, 1): 1.0}, aten.silu.default, {}),
}


def elementary_to_activation(graph: fx.Graph) -> None:
    """Rewrite each activation of ``ACTIVATIONS``. Its elementary calls stay where others read
    them.
    """
    for gate in list(graph.nodes):
        activation = ACTIVATIONS.get(gate.target) if gate.op == "call_function" else None
        if activation is None or not gate.meta["val"].dtype.is_floating_point:
            continue
        if (found := next(_spelled_out(gate, activation), None)) is not None:
            x, result = found
            with graph.inserting_before(result):
                operator, options = activation.operator, activation.options
                replace_node(result, substitute(graph, result, operator, (x,), options))


def _spelled_out(gate: fx.Node, activation: Activation) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operand and the result of activations with this gate."""
    for x in _reached(gate.args[0], _arithmetic_operands):  # type: ignore[arg-type]
        symbols = {x: (1, 0)}
        is_close = _are_close(_polynomial(gate.args[0], symbols, gate), activation.gate, gate)
        if is_close and x.meta["val"].dtype == gate.meta["val"].dtype:  # not of integers
            symbols[gate] = 0, 1
            for result in _reached(gate, _arithmetic_users):
                if _are_close(_polynomial(result, symbols, gate), activation.result, gate):
                    yield x, result


def _arithmetic_operands(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if node.target in _ARITHMETIC else []


def _arithmetic_users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target in _ARITHMETIC]


def _reached(start: fx.Node, following: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """``start``, and the nodes that ``following`` leads to from it, the nearest first."""
    found = nearest = [start]
    for _ in range(DEEPEST):
        yield from nearest
        farther = dict.fromkeys(n for node in nearest for n in following(node))
        nearest = [n for n in farther if n not in found]
        found = found + nearest


def _polynomial(
    value: Any, symbols: Mapping[fx.Node, tuple[int, int]], gate: fx.Node, depth: int = DEEPEST
) -> Polynomial | None:
    """``value`` as a polynomial of ``symbols``; None where it is none. All calls in it must be
    recorded by autograd as the gate is.
    """
    if isinstance(value, (int, float)):
        return {(0, 0): float(value)}
    if value in symbols:
        return {symbols[value]: 1.0}
    combine = _ARITHMETIC.get(value.target) if isinstance(value, fx.Node) else None
    is_alike = combine and _no_grad(value) == _no_grad(gate) and not value.kwargs
    if not is_alike or depth == 0:
        return None
    one, other = (_polynomial(a, symbols, gate, depth - 1) for a in value.args)
    return None if one is None or other is None else combine(one, other)  # type: ignore[misc]


def _no_grad(node: fx.Node) -> bool:
    return bool(node.meta.get("no_grad"))


def _sum(one: Polynomial, other: Polynomial, sign: float = 1.0) -> Polynomial:
    found = dict(one)
    for powers, coefficient in other.items():
        found[powers] = found.get(powers, 0.0) + sign * coefficient
    return found


def _product(one: Polynomial, other: Polynomial) -> Polynomial | None:
    found: Polynomial = {}
    for (i, j), a in one.items():
        for (k, m), b in other.items():
            found[i + k, j + m] = found.get((i + k, j + m), 0.0) + a * b
    return found if all(max(powers) <= LARGEST_POWER for powers in found) else None


def _quotient(one: Polynomial, other: Polynomial) -> Polynomial | None:
    divisor = _number(other)
    return _product(one, {(0, 0): 1 / divisor}) if divisor else None


def _power(one: Polynomial, other: Polynomial) -> Polynomial | None:
    exponent = _number(other)
    if exponent is None or exponent not in range(1, LARGEST_POWER + 1):
        return None
    found: Polynomial | None = {(0, 0): 1.0}
    for _ in range(int(exponent)):
        found = found and _product(found, one)
    return found


def _number(polynomial: Polynomial) -> float | None:
    """The value of a polynomial without symbols."""
    return polynomial[0, 0] if set(polynomial) == {(0, 0)} else None


_ARITHMETIC: dict[Any, Callable[[Polynomial, Polynomial], Polynomial | None]] = {
    aten.add.Tensor: _sum,
    aten.sub.Tensor: lambda one, other: _sum(one, other, -1.0),
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.pow.Tensor_Scalar: _power,
}


def _are_close(found: Polynomial | None, expected: Polynomial, gate: fx.Node) -> bool:
    """Whether two polynomials are equal up to what the gate's dtype resolves."""
    if found is None or set(found) != set(expected):
        return False
    tolerance = min(4 * torch.finfo(gate.meta["val"].dtype).eps, 1e-6)
    return all(math.isclose(found[p], c, rel_tol=tolerance) for p, c in expected.items())
