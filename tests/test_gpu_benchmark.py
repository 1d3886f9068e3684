"""The benchmark for one GPU, on the CPU: all of its code runs, and its table is its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
import torch.distributed as dist

OPTIONS = ["--device", "cpu", "--small", "--models", "gpt2", "--steps", "1", "--repeats", "2"]


@pytest.fixture
def one_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out, profile = folder / "rows.json", folder / "cluster.json"
    status = gpu.main([*OPTIONS, "--out", f"{out}", "--profile", f"{profile}", *more])
    return status, json.loads(out.read_text())


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own, and a busy machine's
def test_all_parts(tmp_path: Path, one_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    # The frontier compiles. The other parts do the same with either backend.
    rehearsal = ["--rehearsals", "llama-1b", "--plans", f"{tmp_path / 'plans'}"]
    status, found = run(tmp_path, "--profile-seconds", "2", "--backends", "eager", *rehearsal)
    assert (status, found["device"], found["small"]) == (0, "cpu", True)
    rows = found["rows"]
    assert [(row["part"], row["unit"]) for row in rows] == [
        ("step", "s"),
        ("frontier", "s"),
        ("frontier", "bytes"),
        ("prediction", "s"),
        ("prediction", "bytes"),
        ("rehearsal", "s"),
        ("rehearsal", "bytes"),
    ]
    for row in rows:
        assert row["ratio"] > 0
        assert row["reference"] > 0
        assert row["value"] > 0
    for row in rows[-3::2]:  # a count on a CPU, and a count planned
        assert row["ratio"] == pytest.approx(1, abs=0.02)
    printed = capsys.readouterr().out
    assert all(row["case"] in printed and f"{row['ratio']:.3f}" in printed for row in rows)


def test_a_part_that_fails_is_a_row_and_the_others_run(
    tmp_path: Path,
    one_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(bench: gpu.Bench, name: str) -> Iterator[gpu.Row]:
        yield gpu.Row("step", name, "first", "s", 2.0, 1.0, 0.5, 0.4, 0.6)
        raise RuntimeError("out of\nmemory")

    def passing(bench: gpu.Bench, name: str) -> Iterator[gpu.Row]:
        yield gpu.Row("frontier", name, "second", "bytes", 2**21, 2**20, 0.5)

    monkeypatch.setattr(gpu, "PARTS", {"step": failing, "frontier": passing})
    status, found = run(tmp_path, "--parts", "step", "frontier")
    assert status == 1
    assert [row["case"] for row in found["rows"]] == ["first", "failed", "second"]
    assert found["rows"][1]["error"] == "RuntimeError: out of memory"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("s", "f"))]
    assert "2000.00 ms   1000.00 ms" in " ".join(lines[0].split()).replace("ms 1", "ms   1")
    assert "0.400 - 0.600" in lines[0]
    assert "2.0 MiB" in lines[2]
