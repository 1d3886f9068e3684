"""Normalisations: statistics over some dims, then an affine map."""

from __future__ import annotations

from typing import Any

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.layer_norm")
def layer_norm(call: OperatorCall) -> Rule:
    inner = [f"n{i}" for i in range(len(call["normalized_shape"]))]
    spec = (
        ", ".join(["~... " + " ".join(inner), *(["~" + " ".join(inner)] * (len(call.inputs) - 1))])
        + " -> ... "
        + " ".join(inner)
    )
    if len(inner) > 1:
        return call.rule(spec, whole=inner)
    # The features may be split, too: the kernel then sums the statistics, two numbers a row in the
    # forward and in the backward, over the axis.
    return call.rule(spec, kernels={"n0": "layer_norm"}, composed=frozenset({"layer_norm"}))


@register_rule("aten.rms_norm")
def rms_norm(call: OperatorCall) -> Rule:
    inner = [f"n{i}" for i in range(len(call["normalized_shape"]))]
    weight = ["~" + " ".join(inner)] * (len(call.inputs) - 1)
    return call.rule(
        ", ".join(["~... " + " ".join(inner), *weight]) + " -> ... " + " ".join(inner), whole=inner
    )


@register_rule("aten.group_norm")
def group_norm(call: OperatorCall) -> Rule:
    groups = call["num_groups"]
    dims = ["b", "(g c)", *(f"s{i}" for i in range(len(call.shape) - 2))]
    operands = ["~" + " ".join(dims), *["~(g c)"] * (len(call.inputs) - 1)]

    def fewer_groups(arguments: dict[str, Any], splits: dict[str, int]) -> dict[str, Any]:
        return {"num_groups": groups // splits.get("g", 1)}

    whole = ["c", *dims[2:]]
    return call.rule(
        f"{', '.join(operands)} -> {' '.join(dims)}",
        whole=whole,
        sizes={"g": groups},
        localise=fewer_groups,
    )


@register_rule("aten.instance_norm")
def instance_norm(call: OperatorCall) -> Rule | None:
    """Instance norm with running statistics, which are means over the batch. Without running
    statistics ``decompose`` writes a group norm.
    """
    dims = [f"d{i}" for i in range(len(call.shape))]
    spec = (
        ", ".join(["~" + " ".join(dims), *(["~d1"] * (len(call.inputs) - 1))])
        + f" -> {' '.join(dims)}"
    )
    if not call["use_input_stats"]:
        return call.rule(spec)
    writes = tuple(
        k for k, n in enumerate(call.inputs) if n in (call["running_mean"], call["running_var"])
    )
    return call.rule(spec, whole=dims, writes=writes)


@register_rule("aten.batch_norm")
def batch_norm(call: OperatorCall) -> Rule:
    space = [f"s{i}" for i in range(len(call.shape) - 2)]
    dims = " ".join(["n", "c", *space])
    spec = ", ".join(["~" + dims, *(["~c"] * (len(call.inputs) - 1))]) + f" -> {dims}"
    if not call["training"]:
        return call.rule(spec)
    # Where the batch or a spatial dim is split, the kernel synchronises the statistics, two numbers
    # a channel in the forward and in the backward. Channels stay whole, because every rank updates
    # whole running statistics.
    return call.rule(
        spec,
        whole="c",
        writes=tuple(
            k for k, n in enumerate(call.inputs) if n in (call["running_mean"], call["running_var"])
        ),
        kernels=dict.fromkeys(["n", *space], "batch_norm"),
        composed=frozenset({"batch_norm"}),
    )
