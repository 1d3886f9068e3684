"""What README.md says is so: its code runs, the options and errors it lists are the ones there are,
its files and make targets exist.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.search.space.options import Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAN, TRAIN, COMPARE, CONSTRAIN, CUT, MODES, OWN, SWEEP = re.findall(
    r"```python\n(.*?)```", README, re.DOTALL
)


def first_column(header: str) -> list[str]:
    """The names in the first column of the table whose head begins with ``header``."""
    table = README[README.index(f"| {header} |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)`", table, re.MULTILINE)


def run(code: list[str], **environment: str) -> str:
    command = subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert command.returncode == 0, command.stderr[-4000:]
    return command.stdout


@pytest.mark.slow
def test_planning_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(PLAN, names)
    assert names["plan"].report().strip() in capsys.readouterr().out
    assert autopar.Plan.load("plan.json") == names["plan"]
    exec(CONSTRAIN, names)
    stored = {
        name: parameter.stored
        for name, parameter in names["plan"].parameters.items()
        if name.endswith("mlp.c_fc.weight")
    }
    assert len(stored) == 12
    assert {repr(layout) for layout in stored.values()} == {"(I, S1)"}
    exec(CUT, names)
    assert [stage.name for stage in names["plan"].stages[1:]] == [
        f"transformer.h.{i} to transformer.h.{i + 2}" for i in (3, 6)
    ] + ["transformer.h.9 to lm_head"]
    assert names["plan"].timeline().strip() in capsys.readouterr().out
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    batch = {"model": names["model"], "sample": names["sample"]}
    exec("import autopar\n" + MODES, batch)
    assert str(batch["found"]).strip() in capsys.readouterr().out  # type: ignore[attr-defined]
    exec("import autopar\n" + OWN, batch)
    assert batch["plan"].modes == {"my_mode": ("mine",)}  # type: ignore[attr-defined]
    exec(SWEEP, names)
    assert str(names["found"]).strip() in capsys.readouterr().out
    assert autopar.Plan.load("plan.json") == names["found"].best


def test_training_code_runs(tmp_path: Path) -> None:
    """The loop, as it stands, on a process group of one."""
    setup = """
import torch, transformers, autopar
world_size, tokens = 1, torch.arange(32).view(2, 16)
sample = {"input_ids": tokens, "labels": tokens}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16))
autopar.plan(model, sample, world_size, progress=False).save("plan.json")
loader = [sample] * 7
"""
    pytest.importorskip("transformers")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = tmp_path / "script.py"
    end = "print(float(loss))\ntorch.distributed.destroy_process_group()\n"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{setup}\n{TRAIN}\n{COMPARE}\n{end}")
    out = run(
        [str(script)],
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    assert 0 < float(out.splitlines()[-1]) < 5
    assert str(autopar.Comparison.load(tmp_path / "comparison.json")).strip() in out


@pytest.mark.slow
def test_a_mode_of_ones_own_trains() -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=4",
    ]
    out = run([*launcher, str(ROOT / "examples/own_mode.py")], GLOO_SOCKET_IFNAME="lo")
    assert "rank 3: near [2, 3], far [1, 3]" in out
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
    assert set(first_column("option")) == own | searched


def test_errors_are_the_ones_there_are() -> None:
    family = {name for name in autopar.__all__ if name.endswith("Error")} - {"AutoparError"}
    assert set(first_column("error")) == family


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
