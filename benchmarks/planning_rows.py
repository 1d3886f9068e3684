"""The rows of ``benchmarks/planning.py``: their models, options and targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from planning_measures import Measured, compile_on_one_rank, further_plans, plan_once, refuse, sweep

if TYPE_CHECKING:
    import torch

SIZES = dict(
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
NARROW = dict(hidden_size=256, intermediate_size=512, vocab_size=1024)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family, configuration
    "Llama-3-8B": ("Llama", SIZES),
    "GPT-3 175B": (
        "GPT2",
        dict(n_layer=96, n_embd=12288, n_head=96, vocab_size=51200, n_positions=2048) | NO_DROPOUT,
    ),
    "Llama-3-405B": (
        "Llama",
        SIZES
        | dict(num_hidden_layers=126, hidden_size=16384)
        | dict(num_attention_heads=128, intermediate_size=53248),
    ),
    "32 narrow layers": ("Llama", SIZES | NARROW),
}
FIXED_8B = dict(
    parallel=dict(data=32, pipeline=2, tensor=dict(size=4, mode="sequence")),
    micro_batch_size=1,
    schedule="1f1b",
    recompute="full",
    zero=1,
)
FIXED_405B = FIXED_8B | dict(
    parallel=dict(data=128, pipeline=16, tensor=dict(size=8, mode="sequence"))
)
FURTHER = (  # what further calls change: the options that a user tries one after the other
    dict(micro_batch_size=2),
    dict(recompute="none"),
    dict(zero=3),
    dict(memory_budget=70e9),
    dict(parallel=dict(data=16, pipeline=4, tensor=dict(size=4, mode="sequence"))),
    dict(parallel=dict(data=32, tensor=dict(size=8, mode="1d")), schedule=None),
    dict(cluster="a100-sxm"),
)
PEER = {  # what meta-pytorch/autoparallel took on a 2-core machine
    "2@32x8": "36 s",
    "8@32x8": "63 s",
    "32@32x8": "86 s, 4.1 GiB",
    "1@4x8x8": "out of 17 GB after 1079 s",
}
DEPTHS = ("100@32x8", "1000@32x8")  # the second may take a tenth longer than the first


@dataclass(frozen=True)
class Row:
    """What one process measures.

    Attributes:
        model: a key of MODELS, or a number of layers of dim 4096.
        batch, sequence: the shape of the global batch.
        world_size: the number of devices.
        options: those of :func:`autopar.plan`; what is not here is free.
        measure: what is timed.
        seconds, gib: the targets; None where there is none.
    """

    model: str | int
    batch: int
    sequence: int
    world_size: int
    options: dict[str, Any] = field(default_factory=dict)
    measure: Callable[..., Measured] = plan_once
    seconds: float | None = None
    gib: float | None = None

    def run(self, cluster: str) -> Measured:
        """Measures the row in this process."""
        family, config = MODELS.get(
            str(self.model), ("Llama", SIZES | dict(num_hidden_layers=self.model))
        )
        model, sample = build(family, config, self.batch, self.sequence)
        return self.measure(model, sample, self.world_size, cluster, self.options)


ROWS = {
    "llama-3-8b": Row("Llama-3-8B", 512, 8192, 256, seconds=6, gib=1),
    "gpt-3-175b": Row("GPT-3 175B", 1536, 2048, 1024, seconds=10, gib=1),
    "llama-3-405b": Row("Llama-3-405B", 2048, 8192, 16384, seconds=20, gib=1.5),
    "32@32x8": Row(32, 64, 2048, 256, dict(mesh=(32, 8)), seconds=3, gib=0.7),
    "1@4x8x8": Row(1, 64, 2048, 256, dict(mesh=(4, 8, 8)), seconds=6, gib=0.7),
    "fixed-8b": Row("Llama-3-8B", 512, 8192, 256, FIXED_8B, seconds=3, gib=0.7),
    "fixed-405b": Row("Llama-3-405B", 2048, 8192, 16384, FIXED_405B, seconds=4, gib=0.7),
    "further-8b": Row(
        "Llama-3-8B",
        *(512, 8192, 256, FIXED_8B),
        partial(further_plans, changes=FURTHER),
        seconds=0.2,
    ),
    "sweep-8b": Row(
        "Llama-3-8B", *(512, 8192, 256, FIXED_8B), partial(sweep, changes=FURTHER), seconds=0.2
    ),
    "refused-8b": Row("Llama-3-8B", 512, 8192, 256, dict(memory_budget=2**30), refuse, seconds=2),
    "100@32x8": Row(100, 64, 2048, 256, dict(mesh=(32, 8))),
    "1000@32x8": Row(1000, 64, 2048, 256, dict(mesh=(32, 8))),
    "compile-256": Row(
        "32 narrow layers",
        *(512, 8192, 256),
        FIXED_8B
        | dict(parallel=dict(data=32, tensor=dict(size=8, mode="sequence")), schedule=None),
        compile_on_one_rank,
        seconds=5,
    ),
    "compile-16384": Row(
        "32 narrow layers",
        *(2048, 8192, 16384),
        FIXED_8B | dict(parallel=dict(data=512, pipeline=4, tensor=dict(size=8, mode="sequence"))),
        compile_on_one_rank,
        seconds=5,
    ),
}


def row_of(name: str) -> Row:
    """The row of a name: one of ROWS, or LAYERS@MESH.

    Raises:
        ValueError: it is neither.
    """
    if name in ROWS:
        return ROWS[name]
    layers, _, mesh = name.partition("@")
    try:
        sizes = tuple(int(size) for size in mesh.split("x"))
        return Row(int(layers), 64, 2048, math.prod(sizes), dict(mesh=sizes))
    except ValueError:
        raise ValueError(
            f"{name!r} is none of {', '.join(ROWS)}, and not LAYERS@MESH, such as 8@32x8"
        ) from None


def build(family: str, config: dict, batch: int, sequence: int) -> tuple[torch.nn.Module, dict]:
    """A transformers model for causal language modelling in bfloat16 on the meta device, and a
    batch for it.
    """
    import torch
    import transformers

    made = getattr(transformers, f"{family}Config")(**config)
    with torch.device("meta"):
        model = getattr(
            transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        )(made).to(torch.bfloat16)
        tokens = torch.empty(batch, sequence, dtype=torch.long)
    return model, dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)
