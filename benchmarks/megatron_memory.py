"""What a GPU holds of Megatron-LM's models by plan, beside figure 1 of arXiv 2205.05198.

The figure has parameters with all that goes with them (16-bit copies, gradients, Adam's state), and
what is kept between forward and backward of layers alone: no embedding, logits, or statistics of
layer norms, which are counted here too.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import torch
from megatron import GPT, constraints

import autopar
from autopar.frontend.traced_model import TracedModel
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.peak_memory import peak_memory_of_plan
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.plan import Plan
from autopar.search.pricing.resize import resized

SEQUENCE, VOCABULARY, TENSOR = 2048, 51200, 8
GIB = 2.0**30


@dataclass(frozen=True)
class Published:
    """A model of the figure: its sizes, and GiB a GPU of parameters and optimizer, of activations
    with nothing recomputed, and of activations with sequence parallelism and selective
    recomputation."""

    name: str
    hidden: int
    heads: int
    layers: int
    microbatch: int
    pipeline: int
    chunks: int
    state: float
    everything: float
    selective: float


FIGURE = (
    Published("22B", 6144, 64, 48, 4, 1, 1, 45.56, 59.25, 9.56),
    Published("530B", 20480, 128, 105, 1, 35, 3, 31.64, 114.02, 23.08),
)


def traced(model: Published) -> tuple[TracedModel, dict[str, Any]]:
    """The model, on no device, with the options of a plan for it."""
    batch = model.microbatch * (8 * model.pipeline if model.pipeline > 1 else 1)
    with torch.device("meta"):
        gpt = GPT(model.hidden, model.heads, model.layers, SEQUENCE, VOCABULARY)
        tokens = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    parallel: dict[str, Any] = dict(tensor=dict(size=TENSOR, mode="1d"), data=1)
    options: dict[str, Any] = {}
    if model.pipeline > 1:
        stages = model.pipeline * model.chunks
        cuts = [f"layers.{i * model.layers // stages}" for i in range(1, stages)]
        parallel["pipeline"] = dict(size=model.pipeline, chunks=model.chunks, split_before=cuts)
        options["schedule"] = "interleaved-1f1b"
    sample = dict(tokens=tokens, labels=tokens.clone())
    return TracedModel(gpt, sample, None, "fp16"), dict(
        parallel=parallel, micro_batch_size=model.microbatch, **options
    )


def planned(model: Published, sequence_parallel: bool) -> Plan:
    """Nothing recomputed; with sequence parallelism as in the paper, attention's insides and what
    is gathered for a product are.
    """
    work, options = traced(model)
    layouts = constraints(1, TENSOR, sequence_parallel)
    fixed: dict[str, Any] = dict(
        cluster="a100-sxm",
        precision="fp16",
        reduce_dtype="fp16",
        zero=0,
        recompute="none",
        memory_budget=1e15,
    )
    plan = autopar.plan(
        work.model,
        work.sample,
        TENSOR * model.pipeline,
        constraints=layouts,
        optimizer="fused-adam",
        progress=False,
        **fixed,
        **options,
    )
    if not sequence_parallel:
        return plan
    analysis, _ = work.analyse(plan.microbatches)
    plan = dataclasses.replace(plan, recomputed=selective(analysis.graph, plan))
    with resized(analysis, model.microbatch, analysis.rules):
        cut = (
            cut_stages(analysis, [stage.start for stage in plan.stages[1:]])
            if len(plan.stages) > 1
            else analysis
        )
        peak = peak_memory_of_plan(cut, plan, "fused-adam", OperatorTracer("cuda"))
    stages = [
        dataclasses.replace(s, kept=k, nbytes=n)
        for s, k, n in zip(plan.stages, peak.saved_bytes, peak.by_kind, strict=True)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def selective(graph: torch.fx.Graph, plan: Plan) -> tuple[str, ...]:
    """The names of attention's scores, softmax, dropout and context, and of what is gathered of
    layer norms.
    """
    inside = [n.name for n in graph.nodes if n.op == "call_function" and _inside_attention(n)]
    gathered = [
        f"{name} -> {layout}"
        for name, ways in plan.conversions.items()
        if name.startswith("layer_norm")
        for layout in ways
    ]
    return (*inside, *gathered)


def _inside_attention(node: torch.fx.Node) -> bool:
    return bool(re.match(r"(matmul|softmax)\b", node.target.__name__)) or (  # type: ignore[union-attr]
        str(node.target).startswith("aten.dropout") and str(node.args[0]).startswith("softmax")
    )


def row(model: Published) -> list[tuple[float, float]]:
    """GiB of the GPUs of the first stage, predicted and published, of each of the figure's three
    bars.
    """
    everything, sparing = (planned(model, sequence_parallel) for sequence_parallel in (False, True))
    held = everything.memory[0]
    state = (
        2 * held["parameters"] + held["optimizer"] + held["compute copies"]
    )  # a gradient for every parameter, as the figure has it
    # Of the chunks of a pipeline together; where there is most in the optimizer's step, when
    # nothing is kept, that of the one stage.
    kept = [
        max(plan.memory[0].get("activations", 0.0), plan.stages[0].kept)
        for plan in (everything, sparing)
    ]
    published = (model.state, model.everything, model.selective)
    return [(found / GIB, seen) for found, seen in zip((state, *kept), published, strict=True)]
