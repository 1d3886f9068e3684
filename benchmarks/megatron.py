"""A GPT as Megatron-LM runs it, and its parallel layout as constraints: to price published runs of
it by the planner's own path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from published import Run
from torch import nn

from autopar.cost_model import Cluster
from autopar.frontend.traced_model import TracedModel
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.outer_search import OuterSearch
from autopar.search.pricing.resize import resized
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.options import Options

VOCABULARY = 50304  # 50257, padded as Megatron pads it so that it splits


class Layer(nn.Module):
    """Attention whose scores lie in memory, and an MLP; activations are [sequence, batch,
    hidden].
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout, self.dropout1, self.dropout2 = (
            nn.Dropout(0.1),
            nn.Dropout(0.1),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, h = x.shape
        parts = (
            self.qkv(self.ln1(x))
            .view(s, b, self.heads, 3 * h // self.heads)
            .split(h // self.heads, -1)
        )
        q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
        scores = torch.matmul(
            q, k.transpose(-1, -2)
        )  # the scale and the mask are part of the fused softmax
        context = torch.matmul(self.dropout(torch.softmax(scores, -1)), v)
        x = x + self.dropout1(self.proj(context.permute(2, 0, 1, 3).reshape(s, b, h)))
        return x + self.dropout2(self.fc2(F.gelu(self.fc1(self.ln2(x)))))


class GPT(nn.Module):
    """Tokens [batch, sequence] to the mean cross entropy of the next one; input and output
    embedding are tied.
    """

    def __init__(
        self, hidden: int, heads: int, layers: int, sequence: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens) + self.position.weight).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x).transpose(0, 1))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def constraints(data: int, tensor: int, sequence_parallel: bool = False) -> dict[str, str]:
    """Megatron's layouts on a mesh of these sizes (arXiv 1909.08053; 2205.05198 with the sequence
    split between the products).
    """
    if tensor == 1:
        return {}

    def layout(batch: str, split: str) -> str:
        return f"{batch} {split}" if data > 1 else split

    state, between = "I", "S0" if sequence_parallel else "I"
    return {
        "layers.*.qkv.weight": layout(state, "S0"),
        "layers.*.fc1.weight": layout(state, "S0"),
        "layers.*.proj.weight": layout(state, "S1"),
        "layers.*.fc2.weight": layout(state, "S1"),
        "embed.weight": layout(state, "S0"),
        "layers.*.dropout": layout("S0", "S1"),
        "layers.*.ln1": layout("S1", between),
        "layers.*.ln2": layout("S1", between),
        "layers.*.dropout1": layout("S1", between),
        "layers.*.dropout2": layout("S1", between),
    }


def batch(size: int, sequence: int) -> dict[str, torch.Tensor]:
    """A sample of the inputs, without memory."""
    tokens = torch.zeros(size, sequence, dtype=torch.long, device="meta")
    return {"tokens": tokens, "labels": tokens}


def gpt(hidden: int, heads: int, layers: int, sequence: int, vocabulary: int = VOCABULARY) -> GPT:
    """The model without memory."""
    with torch.device("meta"):
        return GPT(hidden, heads, layers, sequence, vocabulary)


def options(run: Run) -> dict[str, Any]:
    """Plan's options for a published run of vTrain's."""
    cuts = [f"layers.{i * run.layers // run.pipeline}" for i in range(1, run.pipeline)]
    fixed = configuration(run.tensor, run.pipeline, run.data, run.microbatch)
    if cuts:
        fixed["parallel"]["pipeline"] = dict(size=run.pipeline, split_before=cuts)
    schedule = (
        "1f1b" if run.batch // run.data // run.microbatch >= run.pipeline else "gpipe"
    )  # the same where there are so few
    return fixed | dict(schedule=schedule, reduce_dtype="fp16")


def configuration(
    tensor: int, pipeline: int, data: int, microbatch: int, sequence_parallel: bool = False
) -> dict[str, Any]:
    """Plan's options for Megatron's layouts, everything recomputed, Adam without ZeRO."""
    parallel: dict[str, Any] = {"data": data, "pipeline": pipeline}
    if tensor > 1:
        parallel["tensor"] = dict(size=tensor, mode="1d")
    return dict(
        world_size=tensor * data * pipeline,
        parallel=parallel,
        micro_batch_size=microbatch,
        recompute="full",
        precision="fp16",
        optimizer="fused-adam",
        zero=0,
        constraints=constraints(data, tensor, sequence_parallel),
        memory_budget=1e15,  # they ran: whether they fit is not the question
    )


@contextmanager
def searched(
    traced: TracedModel, samples: int, cluster: Cluster, **options: Any
) -> Iterator[PricedPlan]:
    """What a search finds, its graph within as large as a microbatch."""
    chosen = Options(**options)
    found = (
        OuterSearch(
            InnerSearches(
                lambda n: traced.search_cache(n, cluster), samples, chosen, lambda _: None
            )
        )
        .run()
        .plan
    )
    with resized(found.analysis, samples // found.microbatches, found.analysis.rules):
        yield found
