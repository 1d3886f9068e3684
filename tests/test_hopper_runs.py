"""Predictions from the profile of an H100 beside what was measured on that GPU."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_models
import h100_preset
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
COMPILED_GPT2 = 28.7e-3  # seconds of a step, compiled.compare() on that GPU


def planned(name: str, backend: str, cluster: str | Path = PROFILE) -> autopar.Plan:
    model = gpu_models.build(name, False, torch.device("meta"), torch.float32)
    sample = gpu_models.sample(name, False, torch.device("cpu"), torch.float32)
    asked = dict(precision="bf16", backend=backend, progress=False)
    return autopar.plan(model, sample, 1, cluster=cluster, **asked)


@pytest.mark.parametrize(("name", "most"), [("gpt2", 0.25), ("llama", 0.05)])
def test_an_eager_step_and_its_memory(name: str, most: float) -> None:
    plan = planned(name, "eager")
    assert plan.step_time == pytest.approx(ROWS[name, "eager, total"], rel=most)
    assert plan.peak_memory[0] == pytest.approx(ROWS[name, "eager, peak memory"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "cluster", "measured", "most"),
    [
        ("gpt2", "h100-sxm", ROWS["gpt2", "eager, total"], 0.2),
        ("llama", "h100-sxm", ROWS["llama", "eager, total"], 0.05),
        ("gpt2", "h100-sxm:inductor", COMPILED_GPT2, 0.1),
        ("gpt2", PROFILE, COMPILED_GPT2, 0.2),
    ],
)
def test_the_preset_and_compiled_steps(
    name: str, cluster: str | Path, measured: float, most: float
) -> None:
    """The preset has the rates of the profile's kernels, and none of a step."""
    backend = "inductor" if measured == COMPILED_GPT2 else "eager"
    assert planned(name, backend, cluster).step_time == pytest.approx(measured, rel=most)


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm"])
def test_the_presets_are_those_of_the_profile(name: str) -> None:
    written = json.loads((h100_preset.PRESETS / f"{name}.json").read_text())
    assert written == json.loads(json.dumps(h100_preset.preset(name)))


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
