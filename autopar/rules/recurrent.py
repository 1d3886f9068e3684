"""Recurrent layers: samples are independent; all other dims take part in every step."""

from __future__ import annotations

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.gru", "aten.lstm", "aten.rnn_relu", "aten.rnn_tanh")
def recurrent(call: OperatorCall) -> Rule | None:
    """The sequence is dim 0 and the samples are dim 1, as ``simplify`` writes them. The layers are
    dim 0 of the states. A packed sequence has no rule.
    """
    if call.arguments.get("batch_first", True) or len(call.shapes[0]) != 3:
        return None
    states = 2 if call.name == "aten.lstm" else 1
    weights = [
        " ".join(f"w{k}_{d}" for d in range(len(s)))
        for k, s in enumerate(call.shapes[1 + states :])
    ]
    operands = ["t b i", *["l b h"] * states, *weights]
    whole = ["t", "i", "l", "h", "o", *(f for w in weights for f in w.split())]
    if states == 2 and call.shapes[1] != call.shapes[2]:  # an LSTM with projections
        operands[2] = "l b c"
        whole.append("c")
    drawn = {"b": "drawn"} if call["train"] and call["dropout"] else {}
    return call.rule(", ".join("~" + o for o in operands) + " -> t b o", whole=whole, kernels=drawn)
