"""What README.md and docs/ say is so: options and errors are the ones there are, examples run,
files and make targets exist.

Their Python is run by test_docs.py."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.search.space.options import Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs/options.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs/limits.md").read_text(encoding="utf-8")


def first_column(page: str, header: str) -> list[str]:
    """The names in the first column of the table of a page whose head begins with ``header``."""
    table = page[page.index(f"| {header} |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)`", table, re.MULTILINE)


def run(code: list[str], **environment: str) -> str:
    command = subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert command.returncode == 0, command.stderr[-4000:]
    return command.stdout


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("own_mode", r"rank 3: near \[2, 3\], far \[1, 3\]"),
        ("own_gradient_handler", r"largest of 14 norms 0\.\d+ -> 0\.\d+"),
        ("own_schedule", r"in flight by stage: \[7, 5, 3, 1\]"),
    ],
)
def test_an_extension_of_ones_own_trains(example: str, printed: str) -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=4",
    ]
    out = run([*launcher, str(ROOT / f"examples/{example}.py")], GLOO_SOCKET_IFNAME="lo")
    assert re.search(printed, out), out
    first, last = re.findall(r"loss (\S+) -> (\S+) in", out)[0]
    assert float(last) < 0.2 * float(first)


@pytest.mark.slow
def test_demo_matches_one_process() -> None:
    pytest.importorskip("transformers")
    sizes = "--ranks 2 --steps 4 --layers 1 --hidden 64 --batch 4 --sequence 16"
    parallel = (
        '{"tensor": {"size": 2, "mode": "1d"}}'  # left free, a model this small is not split at all
    )
    out = run([str(ROOT / "examples/train_gpt.py"), *sizes.split(), "--parallel", parallel])
    assert "column-parallel" in out
    difference = re.search(r"largest difference .* at any step: (\S+)", out)
    assert difference is not None, out
    assert float(difference[1]) < 1e-5


def test_options_are_the_ones_there_are() -> None:
    own = set(inspect.signature(autopar.plan).parameters) - {
        "model",
        "sample_input",
        "world_size",
        "options",
    }
    searched = {field.name for field in dataclasses.fields(Options)} - {"world_size"}
    of_compile = {"batch", "timeout", "cuda_graphs"}  # of running, no part of a plan's search
    assert of_compile <= set(inspect.signature(autopar.compile).parameters)
    assert set(first_column(OPTIONS, "option")) == own | searched | of_compile


def test_errors_are_the_ones_there_are() -> None:
    family = {name for name in autopar.__all__ if name.endswith("Error")} - {"AutoparError"}
    assert set(first_column(ERRORS, "error")) == family


def test_names_and_files_exist() -> None:
    used = set(re.findall(r"autopar\.(\w+)", README)) - {"cost_model", "passes"}
    assert used <= set(autopar.__all__)
    for path in set(
        re.findall(r"[\w./]+/[\w./]*\w", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    ):
        if re.match(r"(examples|tests|benchmarks|\.ci)/", path):
            assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", README)) <= targets


ROWS_OF_BENCHMARKS = {  # the table's row, what prints its figure, and how
    "vTrain, 320": ("accuracy.py --only vtrain", r"single node, the others +320 +([\d.]+)"),
    "vTrain, 26": ("accuracy.py --only vtrain", r"multi-node +26 +([\d.]+)"),
    "Megatron-LM's 22B layer": ("accuracy.py --only layer", r"mean error ([\d.]+) %"),
    "Megatron-LM's 22B and 530B": ("accuracy.py --only memory", r"mean error ([\d.]+) %"),
    "Megatron-LM, 1.7": ("accuracy.py --only throughput", r"mean error ([\d.]+) %"),
    "Megatron-LM with Trans": ("b200.py", r"step time: mean error ([\d.]+) %"),
    "the same runs | the same | peak": ("b200.py", r"peak memory: mean error ([\d.]+) %"),
    "NCCL all-reduce": ("accuracy.py --only nccl", r"mean error ([\d.]+) %"),
}
IN_README = {"Megatron-LM with Trans": "Megatron-LM, 4 runs of Llama-3-70B"}


@functools.cache
def printed_by(benchmark: str) -> str:
    name, *arguments = benchmark.split()
    return run([str(ROOT / "benchmarks" / name), *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS_OF_BENCHMARKS)
def test_errors_of_predictions_are_what_the_benchmarks_print(row: str) -> None:
    benchmark, text = ROWS_OF_BENCHMARKS[row]
    found = re.search(text, printed_by(benchmark))
    assert found
    figure = f"{float(found[1]):.1f} %"
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    (line,) = (each for each in page.splitlines() if each.startswith(f"| {row}"))
    assert f"| {figure} |" in line
    start = f"| {IN_README.get(row, row)}"
    for each in README.splitlines():
        if each.startswith(start):
            assert f"| {figure} |" in each
