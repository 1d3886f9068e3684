"""Predictions from the profile of an H100 beside what was measured on that GPU."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_models
import pytest
import torch

import autopar
from autopar import Cluster

FOLDER = Path(__file__).parent.parent / "benchmarks/validation"
PROFILE = FOLDER / "h100_profile.json"
ROWS = {
    (row["model"], row["case"]): row["value"]
    for row in json.loads((FOLDER / "h100_rows.json").read_text())["rows"]
    if row["part"] == "prediction"
}


def planned(name: str, backend: str) -> autopar.Plan:
    model = gpu_models.build(name, False, torch.device("meta"), torch.float32)
    sample = gpu_models.sample(name, False, torch.device("cpu"), torch.float32)
    asked = dict(precision="bf16", backend=backend, progress=False)
    return autopar.plan(model, sample, 1, cluster=PROFILE, **asked)


@pytest.mark.parametrize(("name", "most"), [("gpt2", 0.25), ("llama", 0.05)])
def test_an_eager_step_and_its_memory(name: str, most: float) -> None:
    plan = planned(name, "eager")
    assert plan.step_time == pytest.approx(ROWS[name, "eager, total"], rel=most)
    assert plan.peak_memory[0] == pytest.approx(ROWS[name, "eager, peak memory"], rel=0.01)


def test_a_profile_of_a_gpu_prices_compiled_programs_as_compiled() -> None:
    profile, preset = Cluster.load(PROFILE), Cluster.load("h100-sxm")
    assert profile.run_by("eager") == profile
    for backend in ("inductor", None):
        compiled = profile.run_by(backend)
        assert (compiled.software.name, compiled.software.fuses) == ("inductor", True)
        assert compiled.device == profile.device
        assert preset.run_by(backend) == preset
    assert planned("gpt2", "inductor").step_time < 0.75 * planned("gpt2", "eager").step_time


def test_the_memory_of_a_compiled_step() -> None:
    """GPT-2 held 6.38 GiB, 64 MiB of them workspaces of cuBLAS. Zeros as the gradient of its logits
    were among them, which compiled programs no longer make.
    """
    model = gpu_models.build("gpt2", False, torch.device("meta"), torch.float32)
    sample = gpu_models.sample("gpt2", False, torch.device("cpu"), torch.float32)
    zeros = sample["input_ids"].numel() * model.config.vocab_size * 2
    held = 6.38 * 2**30 - 64 * 2**20 - zeros
    assert planned("gpt2", "inductor").peak_memory[0] == pytest.approx(held, rel=0.03)
