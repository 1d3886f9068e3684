"""A second opinion on a lowered program: its types, inferred anew by ``spmd_types`` from the types
of its inputs.

Nothing is computed or communicated: the graph runs on meta tensors that carry types, on any process
    group, also the fake one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules
from spmd_types.checker import typecheck
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map_only

import autopar.runtime.typecheck.type_rules_nn
import autopar.runtime.typecheck.type_rules_shape  # noqa: F401 - both register their rules
from autopar.capture.function_operator import FunctionOperator
from autopar.errors import RunError
from autopar.ir.layout import I, Layout, S, Type, Z, format_layout, local_shape, parse_type, strided
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.pipeline.recompute import operator_of
from autopar.runtime.typecheck.type_rules import (
    CONTIGUOUS,
    PieceOrder,
    TypedCall,
    einsum,
    find_rule,
    has_piece_orders,
    piece_orders,
    set_piece_orders,
    set_type,
    sharding_axes,
)


def check_types(
    gm: GraphModule,
    mesh: Mesh,
    values: Sequence[torch.Tensor],
    types: Sequence[Layout],
    outputs: Sequence[Layout | None] | None = None,
) -> list[str]:
    """Infers the type of every node of the local program ``gm`` and compares it with what is
    claimed.

    ``values`` are this rank's tensors for the placeholders after ``mesh`` (only shape, dtype and
    ``requires_grad`` are read), ``types`` their layouts; ``outputs``, where given, the layouts that
    the outputs must have. A node whose ``meta["layout"]`` is set is compared with it too. For
    tensors that get no gradient I and R are one type. Raises :class:`RunError` that names the first
    node whose types do not check. That no rule knows an operator, or how it is called, is no error:
    its ``meta["layout"]`` is then taken on trust. Returns the names of these nodes.
    """
    checker = _Checker(gm, mesh)
    with spmd.set_current_mesh(mesh.device_mesh):
        leaves = [checker.typed(_meta(v), layout) for v, layout in zip(values, types, strict=True)]
        results = checker.run(mesh, *leaves, enable_io_processing=False)
        flat = [
            r
            for r in (results if isinstance(results, (tuple, list)) else [results])
            if isinstance(r, torch.Tensor)
        ]
        for i, (result, claim) in enumerate(zip(flat, outputs or [None] * len(flat), strict=True)):
            if claim is not None and not checker.agrees(result, claim):
                raise RunError(
                    f"output {i} has type {format_layout(checker.layout(result))}, but {format_layout(claim)} is "
                    "claimed"
                )
    return checker.trusted


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Those among arguments or results, in their order."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


class _Checker(Interpreter):
    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        super().__init__(gm)
        self._mesh = mesh
        self.trusted: list[str] = []
        self._axes = tuple(spmd.MeshAxis.of(mesh.group(axis)) for axis in range(len(mesh.sizes)))

    def run_node(self, n: Node) -> Any:
        try:
            with torch.enable_grad():
                result = self._call(n) if n.op == "call_function" else super().run_node(n)
            claim = n.meta.get("layout")
            for each in tensors_in(result):
                if claim is not None and not self.agrees(each, claim):
                    raise spmd.SpmdTypeError(
                        f"inferred type {format_layout(self.layout(each))}, but {format_layout(claim)} is claimed"
                    )  # type: ignore[arg-type]
            return result
        except (
            spmd.SpmdTypeError,
            AssertionError,
        ) as error:  # the last: an order of axes that it does not allow
            raise RunError(
                f"types of node {n.name!r} ({n.target}){_where(n)} do not check: "
                f"{error}\n{self._operands(n)}"
            ) from error

    def typed(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """``x`` given the type ``layout``."""
        wide = [(axis, t) for axis, t in zip(self._axes, layout, strict=True) if axis.size() > 1]
        cut = sorted(
            (pair for pair in wide if pair[1].is_shard), key=lambda pair: pair[1].is_inner
        )  # those within all others are minor
        spec = [tuple(axis for axis, t in cut if t.dim == dim) for dim in range(x.ndim)]
        typed = set_type(x, {axis: spmd.V if t.is_shard else _theirs(t) for axis, t in wide}, spec)
        return set_piece_orders(typed, {axis: _order(t) for axis, t in cut})

    def layout(self, x: torch.Tensor) -> Layout:
        """The layout of a typed tensor; an axis of one rank counts as I."""
        types = {
            axis: parse_type(t.name[0])
            for axis, t in spmd.get_local_type(x).items()
            if t is not spmd.V
        }
        of = piece_orders(x)
        types.update(
            {
                axis: _cut_as(of[axis], dim)
                for dim, cut in enumerate(sharding_axes(x))
                for axis in cut
            }
        )
        return tuple(types.get(axis, I) for axis in self._axes)

    def agrees(self, x: torch.Tensor, claim: Layout) -> bool:
        """Whether ``claim`` is the type of ``x``."""
        same = {"I", "R"} if not x.requires_grad else set()
        pairs = zip(self.layout(x), claim, self._mesh.sizes, strict=True)
        return all(
            n == 1
            or (a.kind, a.dim, _order(a)) == (b.kind, b.dim, _order(b))
            or {a.kind, b.kind} <= same
            for a, b, n in pairs
        )

    def _call(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target = operator_of(n.target)
        if target is redistribute:
            return self._redistribute(*args, **kwargs)
        try:  # a user's Function may only run in a program
            result = (
                self._claimed(n)
                if isinstance(target, FunctionOperator)
                else _execute(target, args, kwargs)
            )
        except Exception:  # it does not run on meta tensors, whatever it says
            return self._trusted(n, self._claimed(n))
        if not isinstance(result, (torch.Tensor, tuple, list)) or n.target is operator.getitem:
            return result
        result = tree_map_only(torch.Tensor, _meta, result)
        rule = find_rule(target)
        if rule is None:
            return self._in_order(n, args, kwargs, self._without_rule(n, args, kwargs, result))
        try:
            typed = rule(TypedCall(target, args, kwargs, result, n.meta.get("layout"), self._axes))
        except (spmd.SpmdTypeError, AssertionError):
            raise
        except Exception:  # a call that its rule was not written for
            return self._trusted(n, result)
        if typed is not result:
            rules.output(result, typed)
        return self._in_order(n, args, kwargs, result)

    def _claimed(self, n: Node) -> Any:
        """Tensors of the shapes that the graph claims for a call's results on one rank."""

        trains = any(x.requires_grad for x in tensors_in(self.fetch_args_kwargs_from_env(n)))

        def local(t: torch.Tensor) -> torch.Tensor:
            found = torch.empty(
                local_shape(t.shape, n.meta["layout"], self._mesh.sizes),
                dtype=t.dtype,
                device="meta",
            )
            return found.requires_grad_(trains and (t.is_floating_point() or t.is_complex()))

        if n.meta.get("layout") is None or n.meta.get("val") is None:
            raise spmd.SpmdTypeError(
                "nobody knows the operator, and the graph claims no layout for its result"
            )
        return tree_map_only(torch.Tensor, local, n.meta["val"])

    def _trusted(self, n: Node, result: Any) -> Any:
        """The result as it is claimed to be."""
        if (claim := n.meta.get("layout")) is None:
            raise spmd.SpmdTypeError(
                "nobody knows the operator, and the graph claims no layout for its result"
            )
        self.trusted.append(n.name)
        return tree_map_only(torch.Tensor, lambda t: self.typed(t, claim), result)

    def _in_order(self, n: Node, args: tuple, kwargs: dict, result: Any) -> Any:
        """The result, its pieces in the operands' order, which must be one along each axis; where
        there is none to ask, in the claim's.
        """
        outs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if all(has_piece_orders(out) for out in outs):  # its rule knows
            return result
        found = {
            axis: _order(t)
            for axis, t in zip(self._axes, n.meta.get("layout") or (), strict=False)
            if t.is_shard
        }
        asked: dict[Any, PieceOrder] = {}
        for x in (a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)):
            for axis, order in piece_orders(x).items():
                if asked.setdefault(axis, order) != order:
                    raise spmd.SpmdTypeError(
                        "operands are cut in different orders along axis "
                        f"{self._mesh.names[self._axes.index(axis)]!r}"
                    )
        for out in outs:
            set_piece_orders(out, found | asked)
        return result

    def _redistribute(
        self,
        x: torch.Tensor,
        mesh: Mesh,
        axis: int,
        src: str,
        dst: str,
        reduction_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        source, target, n = parse_type(src), parse_type(dst), mesh.sizes[axis]
        shape = list(x.shape)
        if source.is_shard:
            shape[source.dim] *= n
        if target.is_shard:
            shape[target.dim] //= n
        out = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        move = rules.convert
        if source.kind == "P":
            move = rules.reduce_scatter if target.is_shard else rules.all_reduce
        elif source.is_shard and target.kind != "P":
            move = rules.all_to_all if target.is_shard else rules.all_gather
        if src == dst or source.dim == target.dim >= 0:  # in another order
            move = rules.reinterpret if not source.is_shard else rules.convert
        rules.output(out, move(x, self._axes[axis], src=_theirs(source), dst=_theirs(target)))
        if not target.is_inner and any(
            list(cut) != [a for a in self._axes if a in cut] for cut in sharding_axes(out)
        ):
            raise spmd.SpmdTypeError(
                f"dim {target.dim} is already cut on a later axis, which would become the major one"
            )
        return set_piece_orders(
            out, piece_orders(x) | ({self._axes[axis]: _order(target)} if target.is_shard else {})
        )

    def _without_rule(self, n: Node, args: tuple, kwargs: dict, result: Any) -> Any:
        """On whole tensors anything goes; on cut or pending ones, what DTensor knows of the
        operator, or else the claim.
        """
        tensors, flat = tensors_in((args, kwargs)), tensors_in(result)
        if not tensors:  # made of nothing: the same on all ranks
            for out in flat:
                set_type(
                    out, {axis: spmd.R for axis in self._axes if axis.size() > 1}, [()] * out.ndim
                )
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
        except Exception:  # it does not know the operator either
            return self._trusted(n, tree_map_only(torch.Tensor, _meta, result))
        return result

    def _operands(self, n: Node) -> str:
        known = {
            a.name: self.env[a]
            for a in n.all_input_nodes
            if isinstance(self.env.get(a), torch.Tensor)
        }
        return "\n".join(
            f"  {name}: {format_layout(self.layout(x))} {tuple(x.shape)}"
            for name, x in known.items()
        )


def _theirs(t: Type) -> Any:
    return spmd.S(t.dim) if t.is_shard else getattr(spmd, t.kind)


def _order(t: Type) -> PieceOrder:
    return (t.letter, t.pieces) if t.pieces > 1 else CONTIGUOUS


def _cut_as(order: PieceOrder, dim: int) -> Type:
    letter, pieces = order
    return Z(dim) if letter == "Z" else strided(dim, pieces) if pieces > 1 else S(dim)


def _execute(target: Any, args: tuple, kwargs: dict) -> Any:
    """Shapes only: kernels that would communicate have the shape of what they stand for."""
    if isinstance(target, torch._ops.OpOverload):
        with torch.device("meta"):
            return target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    shape_of = _SHAPES.get(getattr(target, "__name__", ""))
    return target(*args, **kwargs) if shape_of is None else shape_of(*args)


def _like_first(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x, requires_grad=x.requires_grad)


def _rows(weight: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(
        *ids.shape,
        weight.shape[1],
        dtype=weight.dtype,
        device="meta",
        requires_grad=weight.requires_grad,
    )


def _scalar(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty((), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    stride: Any,
    dilation: Any,
    margins: Any,
    *rest: Any,
) -> torch.Tensor:
    """With zeros for what neighbours send."""
    wide = torch.nn.functional.pad(x, [n for sides in reversed(margins) for n in sides])
    groups, none = x.shape[1] // weight.shape[1], [0] * len(margins)
    return torch.ops.aten.convolution.default(
        wide, weight, bias, list(stride), none, list(dilation), False, none, groups
    )


_SHAPES: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy_vocabulary": _scalar,
    "embedding_vocabulary": _rows,
    "sync_batch_norm": _like_first,
    "layer_norm_features": _like_first,
    "conv_halo": _convolved,
    "dropout": _like_first,
    "attention": lambda q, k, v, *rest: _like_first(q),
    "ring_attention": lambda q, k, v, *rest: _like_first(q),
    "summa_linear": lambda x, weight, *rest: torch.empty(
        *x.shape[:-1],
        len(weight),
        dtype=x.dtype,
        device="meta",
        requires_grad=x.requires_grad or weight.requires_grad,
    ),
}


def _where(n: Node) -> str:
    parts = [str(n.meta[key]) for key in ("module", "source") if n.meta.get(key)]
    return f" in {', '.join(parts)}" if parts else ""
