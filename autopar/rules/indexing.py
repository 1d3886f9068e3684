"""Embeddings, gathers, indexing, and tensors made from nothing."""

from __future__ import annotations

import torch.fx as fx

from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.embedding")
def embedding(call: Call) -> Rule | None:
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None
    # A split vocabulary looks up what it holds and leaves zeros: a pending sum.
    return call.rule("v h, ~... -> ... h", kernels={"v": "embedding_vocabulary"})


@register_rule("aten.gather", "aten.take_along_dim")
def gather(call: Call) -> Rule | None:
    if call["dim"] is None:  # take_along_dim of flattened tensors
        return None
    n, (dim,) = len(call.shape), call.dims("dim")
    source = [f"d{d}" if call.shapes[0][d] == call.shape[d] and d != dim else f"s{d}" for d in range(n)]
    index = " ".join(f"d{d}" for d in range(n))
    whole = [f"d{d}" for d in range(n) if source[d] != f"d{d}" and d != dim] + [f for f in source if f[0] == "s"]
    # The source must be whole along the dim looked up; the index need not be.
    return call.rule(f"{' '.join(source)}, ~{index} -> {index}", whole=whole)


@register_rule("aten.index_select")
def index_select(call: Call) -> Rule:
    n, (dim,) = len(call.shape), call.dims("dim")
    source = " ".join("v" if d == dim else f"d{d}" for d in range(n))
    out = " ".join("i" if d == dim else f"d{d}" for d in range(n))
    return call.rule(f"{source}, ~i -> {out}", whole="v")


@register_rule("aten.index")
def index(call: Call) -> Rule | None:
    """Advanced indexing by adjacent dims: the indexed dims are whole, the indices broadcast."""
    given = call["indices"]
    places = [d for d, i in enumerate(given) if isinstance(i, fx.Node)]
    if (
        not places
        or places != list(range(places[0], places[-1] + 1))
        or any(i.meta["val"].dtype.is_floating_point for i in call.inputs[1:])
    ):
        return None
    if any(str(i.meta["val"].dtype) == "torch.bool" for i in call.inputs[1:]):
        return None
    n = len(call.shapes[0])
    broadcast = max(len(s) for s in call.shapes[1:])
    before, after = range(places[0]), range(places[-1] + 1, n)
    names = [f"b{i}" for i in range(broadcast)]
    source = " ".join(f"v{d}" if d in places else f"d{d}" for d in range(n))
    out = " ".join([*(f"d{d}" for d in before), *names, *(f"d{d}" for d in after)])
    indices = [" ".join(names[broadcast - len(s) :]) for s in call.shapes[1:]]
    sizes = {f"b{i}": n for i, n in enumerate(call.shape[len(before) : len(before) + broadcast])}
    return call.rule(
        ", ".join([source, *("~" + i for i in indices)]) + f" -> {out}",
        whole=[f"v{d}" for d in places],
        sizes=sizes,
    )


@register_rule("aten.zeros", "aten.ones", "aten.full", "aten.new_zeros", "aten.new_ones", "aten.new_full")
def constant(call: Call) -> Rule:
    names = [f"d{d}" for d in range(len(call.shape))]
    operands = tuple(tuple(() for _ in s) for s in call.shapes)  # new_zeros(x) reads x's dtype only
    sizes = {f: n for f, n in zip(names, call.shape, strict=True) if n != 1}
    output = tuple((f,) if f in sizes else () for f in names)
    return Rule(operands, output, sizes, kind="view", shape_argument="size")


@register_rule("aten.zeros_like", "aten.ones_like", "aten.full_like")
def constant_like(call: Call) -> Rule:
    return call.rule("~... -> ...")


@register_rule("aten.triu", "aten.tril")
def triangle(call: Call) -> Rule:
    return call.rule("... i j -> ... i j", whole="ij")


@register_rule("aten.one_hot")
def one_hot(call: Call) -> Rule:
    return call.rule("~... -> ... v", whole="v")


@register_rule("aten.arange", "aten.scalar_tensor")
def sequence(call: Call) -> Rule:
    names = [f"d{d}" for d in range(len(call.shape))]
    return call.rule(f" -> {' '.join(names)}", whole=names)
