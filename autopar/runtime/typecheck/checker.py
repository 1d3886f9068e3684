"""A second opinion on a lowered program: ``spmd_types`` infers the type of every node anew, from
the types of the program's inputs.

Nothing is computed or communicated. The graph runs on meta tensors that carry types, on any process
group, also on torch's fake one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules
from spmd_types.checker import typecheck
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map_only

import autopar.runtime.typecheck.type_rules_elementwise
import autopar.runtime.typecheck.type_rules_kernels
import autopar.runtime.typecheck.type_rules_nn
import autopar.runtime.typecheck.type_rules_reduce
import autopar.runtime.typecheck.type_rules_shape  # noqa: F401 - these register their rules
from autopar.capture.function_operator import FunctionOperator
from autopar.errors import RunError
from autopar.ir.layout import I, Layout, format_layout, local_shape, parse_type
from autopar.runtime.communication.arrivals import arrived
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.zero_buckets import gather_bucket, start_gather
from autopar.runtime.pipeline.recompute import operator_of
from autopar.runtime.typecheck.conversion_types import redistributed
from autopar.runtime.typecheck.equations import einsum
from autopar.runtime.typecheck.kernel_shapes import run_on_meta
from autopar.runtime.typecheck.type_rules import TypedCall, find_rule
from autopar.runtime.typecheck.typed_tensors import (
    PieceOrder,
    has_piece_orders,
    meta_tensor,
    piece_order,
    piece_orders,
    set_piece_orders,
    set_type,
    sharding_axes,
    spmd_type,
    tensors_in,
    type_of_order,
)


def check_types(
    gm: GraphModule,
    mesh: Mesh,
    values: Sequence[torch.Tensor],
    types: Sequence[Layout],
    outputs: Sequence[Layout | None] | None = None,
) -> list[str]:
    """Infers the type of every node of the local program ``gm`` and compares it with the layout
    that the graph claims.

    Arguments: ``values``, this rank's tensors for the placeholders after ``mesh``, of which only
    shape, dtype and ``requires_grad`` are read; ``types``, their layouts; ``outputs``, where given,
    the layouts that the outputs must have. A node's claim is its ``meta["layout"]``. For tensors
    that get no gradient, I and R are one type.

    Raises :class:`RunError` that names the first node whose types do not check. Where no rule knows
    an operator, or the way in which it is called, the node's claim is trusted. Returns the names of
    these nodes.
    """
    checker = _Checker(gm, mesh)
    with spmd.set_current_mesh(mesh.device_mesh):
        inputs = [
            checker.typed(meta_tensor(v), layout) for v, layout in zip(values, types, strict=True)
        ]
        results = checker.run(mesh, *inputs, enable_io_processing=False)
        flat = [
            r
            for r in (results if isinstance(results, (tuple, list)) else [results])
            if isinstance(r, torch.Tensor)
        ]
        for i, (result, claim) in enumerate(zip(flat, outputs or [None] * len(flat), strict=True)):
            if claim is not None and not checker.agrees(result, claim):
                raise RunError(
                    f"output {i} has type {format_layout(checker.layout(result))}, but "
                    f"{format_layout(claim)} is claimed"
                )
    return checker.trusted


class _Checker(Interpreter):
    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        super().__init__(gm)
        self._mesh = mesh
        self.trusted: list[str] = []
        self._axes = tuple(spmd.MeshAxis.of(mesh.group(axis)) for axis in range(len(mesh.sizes)))

    def run_node(self, n: Node) -> Any:
        # spmd_types raises AssertionError for an order of axes that it does not allow.
        try:
            with torch.enable_grad():
                result = self._call(n) if n.op == "call_function" else super().run_node(n)
            claim = n.meta.get("layout")
            for each in tensors_in(result):
                if claim is not None and not self.agrees(each, claim):
                    raise spmd.SpmdTypeError(
                        f"inferred type {format_layout(self.layout(each))}, but "
                        f"{format_layout(claim)} is claimed"
                    )  # type: ignore[arg-type]
            return result
        except (spmd.SpmdTypeError, AssertionError) as error:
            raise RunError(
                f"types of node {n.name!r} ({n.target}){_place(n)} do not check: "
                f"{error}\n{self._operands(n)}"
            ) from error

    def typed(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Gives ``x`` the type ``layout``."""
        wide = [(axis, t) for axis, t in zip(self._axes, layout, strict=True) if axis.size() > 1]
        # An axis that cuts within the chunks of all others is minor, so it comes last.
        cut = sorted((pair for pair in wide if pair[1].is_shard), key=lambda pair: pair[1].is_inner)
        spec = [tuple(axis for axis, t in cut if t.dim == dim) for dim in range(x.ndim)]
        types = {axis: spmd.V if t.is_shard else spmd_type(t) for axis, t in wide}
        return set_piece_orders(set_type(x, types, spec), {axis: piece_order(t) for axis, t in cut})

    def layout(self, x: torch.Tensor) -> Layout:
        """The layout of a typed tensor; an axis of one rank counts as I."""
        local_types, orders = spmd.get_local_type(x).items(), piece_orders(x)
        types = {axis: parse_type(t.name[0]) for axis, t in local_types if t is not spmd.V}
        for dim, cut in enumerate(sharding_axes(x)):
            types.update({axis: type_of_order(orders[axis], dim) for axis in cut})
        return tuple(types.get(axis, I) for axis in self._axes)

    def agrees(self, x: torch.Tensor, claim: Layout) -> bool:
        """Whether ``claim`` is the type of ``x``."""
        same = {"I", "R"} if not x.requires_grad else set()
        pairs = zip(self.layout(x), claim, self._mesh.sizes, strict=True)
        return all(
            n == 1
            or (a.kind, a.dim, piece_order(a)) == (b.kind, b.dim, piece_order(b))
            or {a.kind, b.kind} <= same
            for a, b, n in pairs
        )

    def _call(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target = operator_of(n.target)
        if target is redistribute:
            return redistributed(self._axes, *args, **kwargs)
        if target is arrived:
            return args[0]
        if target is start_gather:
            return None
        if target is gather_bucket:
            parts, mesh, axis, sources, *rest = args
            pairs = zip(parts, sources, strict=True)
            return [redistributed(self._axes, x, mesh, axis, src, *rest) for x, src in pairs]
        try:
            # A user's autograd Function may be run in a program only.
            is_function = isinstance(target, FunctionOperator)
            result = self._claimed(n) if is_function else run_on_meta(target, args, kwargs)
        except Exception:  # the operator does not run on meta tensors, for whatever reason
            return self._trusted(n, self._claimed(n))
        if not isinstance(result, (torch.Tensor, tuple, list)) or n.target is operator.getitem:
            return result
        result = tree_map_only(torch.Tensor, meta_tensor, result)
        rule = find_rule(target)
        if rule is None:
            return self._in_order(n, args, kwargs, self._without_rule(n, args, kwargs, result))
        try:
            typed = rule(TypedCall(target, args, kwargs, result, n.meta.get("layout"), self._axes))
        except (spmd.SpmdTypeError, AssertionError):
            raise
        except Exception:  # a form of call for which the rule was not written
            return self._trusted(n, result)
        if typed is not result:
            rules.output(result, typed)
        return self._in_order(n, args, kwargs, result)

    def _claimed(self, n: Node) -> Any:
        """Untyped tensors of the shapes that the graph claims for a call's results on one rank."""
        claim, trains = _claim(n, "val"), _has_gradient(self.fetch_args_kwargs_from_env(n))

        def local(t: torch.Tensor) -> torch.Tensor:
            shape = local_shape(t.shape, claim, self._mesh.sizes)
            found = torch.empty(shape, dtype=t.dtype, device="meta")
            return found.requires_grad_(trains and (t.is_floating_point() or t.is_complex()))

        return tree_map_only(torch.Tensor, local, n.meta["val"])

    def _trusted(self, n: Node, result: Any) -> Any:
        """The result with the type that the graph claims."""
        claim = _claim(n)
        self.trusted.append(n.name)
        return tree_map_only(torch.Tensor, lambda t: self.typed(t, claim), result)

    def _in_order(self, n: Node, args: tuple, kwargs: dict, result: Any) -> Any:
        """Gives the results the operands' orders of pieces, which must be the same along each axis.
        Where no operand is cut along an axis, the order is the claim's.
        """
        outs = tensors_in(result)
        if all(has_piece_orders(out) for out in outs):  # the rule has set them
            return result
        claimed = {
            axis: piece_order(t)
            for axis, t in zip(self._axes, n.meta.get("layout") or (), strict=False)
            if t.is_shard
        }
        orders: dict[Any, PieceOrder] = {}
        for x in tensors_in((args, kwargs)):
            for axis, order in piece_orders(x).items():
                if orders.setdefault(axis, order) != order:
                    raise spmd.SpmdTypeError(
                        "operands are cut in different orders along axis "
                        f"{self._mesh.names[self._axes.index(axis)]!r}"
                    )
        for out in outs:
            set_piece_orders(out, claimed | orders)
        return result

    def _without_rule(self, n: Node, args: tuple, kwargs: dict, result: Any) -> Any:
        """Types a call that has no rule. On whole tensors every operator is allowed. On cut or
        pending ones DTensor's knowledge of the operator decides, or else the claim.
        """
        tensors, flat = tensors_in((args, kwargs)), tensors_in(result)
        if not tensors:  # the result is the same on all ranks
            types = {axis: spmd.R for axis in self._axes if axis.size() > 1}
            for out in flat:
                set_type(out, types, [()] * out.ndim)
            return result
        if not any(
            any(sharding_axes(t)) or spmd.P in spmd.get_local_type(t).values() for t in tensors
        ):
            for out in flat:
                rules.output(out, einsum(["_" * t.ndim for t in tensors], "_" * out.ndim, tensors))
            return result
        try:
            with typecheck(local=False):
                typed = n.target(*args, **kwargs)  # type: ignore[operator]
            for out, t in zip(flat, tensors_in(typed), strict=True):
                spmd.assert_type(
                    out, dict(spmd.get_local_type(t)), partition_spec=spmd.get_partition_spec(t)
                )
        except Exception:  # DTensor does not know the operator either
            return self._trusted(n, tree_map_only(torch.Tensor, meta_tensor, result))
        return result

    def _operands(self, n: Node) -> str:
        """The operands of a node, one on each line, with layout and local shape."""
        known = {
            a.name: self.env[a]
            for a in n.all_input_nodes
            if isinstance(self.env.get(a), torch.Tensor)
        }
        return "\n".join(
            f"  {name}: {format_layout(self.layout(x))} {tuple(x.shape)}"
            for name, x in known.items()
        )


def _claim(n: Node, *needed: str) -> Layout:
    """The layout that the graph claims for a node, whose operator nobody knows; ``needed`` are
    further keys that its ``meta`` must have.
    """
    if any(n.meta.get(key) is None for key in ("layout", *needed)):
        raise spmd.SpmdTypeError(
            "nobody knows the operator, and the graph claims no layout for its result"
        )
    claim: Layout = n.meta["layout"]
    return claim


def _has_gradient(arguments: Any) -> bool:
    return any(x.requires_grad for x in tensors_in(arguments))


def _place(n: Node) -> str:
    """Where the model calls a node's operator."""
    parts = [str(n.meta[key]) for key in ("module", "source") if n.meta.get(key)]
    return f" in {', '.join(parts)}" if parts else ""
