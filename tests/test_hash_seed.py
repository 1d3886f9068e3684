"""The captured graph, its fingerprint and the plan do not depend on Python's hash seed, nor on
addresses.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.frontend.traced_model import TracedModel
from autopar.kernel_trace.footprint import Footprint
from autopar.kernel_trace.operator_trace import OperatorTrace, TracedResult
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.memory.conversion_trace import complete
from autopar.memory.traced_call import TracedCall, TracedStorage

KINDS = {"sliding", "full", "global"}  # a set, as transformers has for the kinds of layers


class Rotary(nn.Module):
    """A buffer with a table of angles for each kind of layer; ModernBERT has two kinds."""

    def __init__(self) -> None:
        super().__init__()
        for i, kind in enumerate(sorted(KINDS), 1):
            self.register_buffer(f"{kind}_frequency", torch.linspace(0.1, 1.0, 4) * i)

    def forward(self, positions: torch.Tensor, kind: str) -> torch.Tensor:
        return (positions[:, None] * getattr(self, f"{kind}_frequency")).cos() * torch.tensor(
            [1.0, 2.0, 3.0, float(len(kind))]
        )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = {kind: self.rotary(torch.arange(8.0), kind) for kind in KINDS}
        for layer, kind in zip(self.layers, ("full", "sliding", "global", "full"), strict=True):
            x = x + F.gelu(layer(x * tables[kind]))
        return x.square().mean()


def described() -> str:
    """The fingerprint of the graph, and the plan without its timings."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8, 4)
    traced = TracedModel(model, x, None).whole
    constants = [traced.state[i.target].tolist() for i in traced.inputs if i.kind == "constant"]
    plan = autopar.plan(model, x, 4, cluster="a100-sxm", progress=False)
    plan.timings.clear()
    return (
        f"{traced.fingerprint} "
        f"{hashlib.sha256(repr((constants, traced.inputs, plan)).encode()).hexdigest()}"
    )


def test_graph_and_plan_do_not_depend_on_the_hash_seed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import test_hash_seed; print(test_hash_seed.described())"]
    running = [
        subprocess.Popen(
            command, env={**environment, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "3", "4")
    ]
    found = [process.communicate(timeout=200)[0].strip().splitlines()[-1] for process in running]
    assert len(set(found)) == 1, found


def test_saved_tensors_have_the_order_of_operands_and_results() -> None:
    """On it depends what a compiler is taken to save: with an order of addresses, ranks would plan
    different memory.
    """
    call, other = TracedCall("median", (0, 0), None), TracedCall("before", (0, 0), None)
    storages = [TracedStorage(8, other) for _ in range(40)]
    random.Random(0).shuffle(storages)
    made = [TracedStorage(8, call) for _ in range(40)]
    random.Random(1).shuffle(made)
    results = tuple(
        TracedResult(contiguous_spec((1,), torch.float64, True), None, 8, True) for _ in made
    )
    trace = OperatorTrace(results, frozenset(range(40)), (), True, (), (), Footprint)
    complete(call, trace, storages, made, [None] * 40)
    assert call.saved == [*storages, *made]
