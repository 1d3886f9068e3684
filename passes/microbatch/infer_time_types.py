"""Choose the inputs that microbatches divide, and infer the types along time that follow."""

from __future__ import annotations

import itertools

import torch.fx as fx

from autopar.capture.function_operator import FunctionOperator
from autopar.errors import PlanError
from autopar.ir.layout import R, S, strided
from autopar.ir.nodes import describe_node, operands
from autopar.passes.microbatch.time_types import (
    NotTypedError,
    TimeTypes,
    needs_whole_gradient,
)
from autopar.rules.analysis import Analysis

_MAX_WHOLE_INPUTS = 2  # inputs of the batch's size that may hold something else than samples
_MAX_PARTS_TRIED = 3  # numbers of equal parts that are tried


def infer_time_types(analysis: Analysis) -> TimeTypes | PlanError:
    """The types along time for the choice of divided inputs that splits most arithmetic.

    As few inputs as possible stay whole, and the batch is taken apart only if the types need it.

    Returns:
        The types; or the error to raise, if no choice gives the outputs a type other than R. The
        error names the operator that mixes samples.
    """
    heads = {n: d for n in analysis.inputs if (d := analysis.batch.dim(n)) is not None}
    order = {n: i for i, n in enumerate(analysis.graph.nodes)}
    outputs = [n for n in analysis.outputs if isinstance(n, fx.Node)]
    mixing: list[fx.Node] = []
    for parts in (1, *_numbers_of_parts(analysis)):
        for left_out in range(min(_MAX_WHOLE_INPUTS, len(heads) - 1) + 1):
            found: list[TimeTypes] = []
            for whole in itertools.combinations(heads, left_out):
                cut = {
                    n: strided(d, parts) if parts > 1 else S(d)
                    for n, d in heads.items()
                    if n not in whole
                }
                try:
                    found.append(TimeTypes(analysis, cut, parts))
                except NotTypedError as e:
                    mixing += [e.node] if not left_out else []
            mixing = mixing or [n for types in found for n in types.forced_hoists[:1]]
            found = [t for t in found if any(t.inferred[n] is not R for n in outputs)]
            if found:
                return max(found, key=lambda types: types.split_flops)
    # The last of the operators says most: types reached it from the inputs.
    return _mixing_error(analysis, max(mixing, key=order.__getitem__, default=analysis.loss))


def _numbers_of_parts(analysis: Analysis) -> list[int]:
    """The numbers of equal parts into which views of the model take the batch apart."""
    counts: dict[int, None] = {}
    for node, rule in analysis.rules.items():
        if rule is None or rule.kind != "view":
            continue
        for (tensor, _), dims in zip(operands(node), rule.operands, strict=True):
            for d, dim in enumerate(dims):
                if (
                    len(dim) > 1
                    and analysis.batch.is_batch_dim(tensor, d)
                    and analysis.batch.size % (parts := rule.sizes[dim[0]]) == 0
                ):
                    counts[parts] = None
    return [n for n in counts if 1 < n < analysis.batch.size][:_MAX_PARTS_TRIED]


def _mixing_error(analysis: Analysis, node: fx.Node) -> PlanError:
    dims = [
        f"dim {d} of {tuple(n.meta['val'].shape)}"
        for n, _ in operands(node)
        if (d := analysis.batch.dim(n)) is not None
    ]
    if not dims and needs_whole_gradient(analysis, node):
        why = (
            "has a backward that is not known to be linear in the gradient, which each microbatch "
            "would give it in part (register_rule says that it is)"
        )
    elif isinstance(node.target, FunctionOperator) and analysis.rules.get(node) is not None:
        why = "is not known to keep samples apart (register_rule gives it a rule that says so)"
    elif analysis.rules.get(node) is None:
        why = (
            "has no rule, so nothing tells that it keeps samples apart (register_rule gives it one)"
        )
    else:
        why = "mixes samples, so that losses of microbatches do not add up"
    where = f" (the batch is {' and '.join(dict.fromkeys(dims))})" if dims else ""
    return PlanError(
        f"micro_batch_size: {describe_node(node)} {why}{where}; leave micro_batch_size out"
    )
