"""Embeddings, gathers, indexing, and new tensors of constants."""

from __future__ import annotations

import torch.fx as fx

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.embedding")
def embedding(call: OperatorCall) -> Rule | None:
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None
    # Each rank looks up the rows that it has, and takes zeros for others: a pending sum.
    return call.rule("v h, ~... -> ... h", kernels={"v": "embedding_vocabulary"})


@register_rule("aten.gather", "aten.take_along_dim")
def gather(call: OperatorCall) -> Rule | None:
    if call["dim"] is None:  # take_along_dim flattens both tensors
        return None
    n, (dim,) = len(call.shape), call.dims("dim")
    source = [
        f"d{d}" if call.shapes[0][d] == call.shape[d] and d != dim else f"s{d}" for d in range(n)
    ]
    index = " ".join(f"d{d}" for d in range(n))
    whole = [f"d{d}" for d in range(n) if source[d] != f"d{d}" and d != dim] + [
        f for f in source if f[0] == "s"
    ]
    # The source must be whole along the dim that the index counts; the index need not be.
    return call.rule(f"{' '.join(source)}, ~{index} -> {index}", whole=whole)


@register_rule("aten.index_select")
def index_select(call: OperatorCall) -> Rule:
    n, (dim,) = len(call.shape), call.dims("dim")
    source = " ".join("v" if d == dim else f"d{d}" for d in range(n))
    out = " ".join("i" if d == dim else f"d{d}" for d in range(n))
    return call.rule(f"{source}, ~i -> {out}", whole="v")


@register_rule("aten.index")
def index(call: OperatorCall) -> Rule | None:
    """Advanced indexing of adjacent dims: indexed dims are whole, and indices are broadcast."""
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


_FILLED = "zeros ones full empty new_zeros new_ones new_full new_empty"


@register_rule(*(f"aten.{n}" for n in _FILLED.split()))
def constant(call: OperatorCall) -> Rule:
    names = [f"d{d}" for d in range(len(call.shape))]
    operands = tuple(tuple(() for _ in s) for s in call.shapes)  # new_zeros reads only the dtype
    sizes = {f: n for f, n in zip(names, call.shape, strict=True) if n != 1}
    output = tuple((f,) if f in sizes else () for f in names)
    return Rule(operands, output, sizes, kind="view", shape_argument="size")


@register_rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def constant_like(call: OperatorCall) -> Rule:
    return call.rule("~... -> ...")


_WHOLE = """linspace logspace eye triu_indices tril_indices randperm hann_window hamming_window
blackman_window bartlett_window kaiser_window"""


@register_rule(*(f"aten.{n}" for n in _WHOLE.split()))
def whole_constant(call: OperatorCall) -> Rule:
    """Each rank makes the whole tensor, which is cheap."""
    return sequence(call)


@register_rule("aten.triu", "aten.tril")
def triangle(call: OperatorCall) -> Rule:
    return call.rule("... i j -> ... i j", whole="ij")


@register_rule("aten.diagonal")
def diagonal(call: OperatorCall) -> Rule:
    n = len(call.shapes[0])
    pair = [call[name] % n for name in ("dim1", "dim2")]
    rest = [f"d{d}" for d in range(n) if d not in pair]
    return call.rule(
        f"{' '.join(f'd{d}' for d in range(n))} -> {' '.join([*rest, 'k'])}",
        whole=["k", *(f"d{d}" for d in pair)],
    )


@register_rule("aten.diag_embed")
def diag_embed(call: OperatorCall) -> Rule:
    n = len(call.shape)
    pair = [call[name] % n for name in ("dim1", "dim2")]
    rest = [f"d{d}" for d in range(n) if d not in pair]
    return call.rule(
        f"{' '.join([*rest, 'k'])} -> {' '.join(f'd{d}' for d in range(n))}",
        whole=["k", *(f"d{d}" for d in pair)],
    )


@register_rule("aten.bucketize", "aten.isin")
def membership(call: OperatorCall) -> Rule | None:
    """Each element is looked up in a list, which is whole."""
    if len(call.inputs) != 2:
        return None
    listed = " ".join(f"l{d}" for d in range(len(call.shapes[1])))
    return call.rule(f"~..., ~{listed} -> ...", whole=listed.split())


@register_rule("aten.searchsorted")
def searchsorted(call: OperatorCall) -> Rule | None:
    """All elements are looked up in one list, or the elements of each row in a row of the lists."""
    if len(call.inputs) != 2:
        return None
    return call.rule(
        "~s, ~... -> ..." if len(call.shapes[0]) == 1 else "~... s, ~... v -> ... v", whole="s"
    )


@register_rule("aten.one_hot")
def one_hot(call: OperatorCall) -> Rule:
    return call.rule("~... -> ... v", whole="v")


@register_rule("aten.arange", "aten.scalar_tensor")
def sequence(call: OperatorCall) -> Rule:
    names = [f"d{d}" for d in range(len(call.shape))]
    bounds = ", ".join("~" for _ in call.inputs)  # linspace and logspace may take tensors
    return call.rule(f"{bounds} -> {' '.join(names)}", whole=names)
