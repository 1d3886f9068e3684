"""What one GPU can show of a program for one device: its step beside the plain model's, eager and
compiled; its time within the memory that torch's ``activation_memory_budget`` takes; a plan's
predictions beside the measurements, after a profile of the GPU; and the first rank of plans for
more GPUs, rehearsed.

Prints one table, and writes it as JSON after each part, so that a run that is cut off leaves what
it had. A part that fails becomes a row with its error, and the exit status is 1.
``--device cpu --small`` runs all of it on one core of any machine, in minutes.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from frontier import peak_bytes
from gpu_models import MODELS, Sample, build, sample
from gpu_rehearsals import REHEARSED
from gpu_rows import Row, table, write
from local_ranks import one_thread_a_rank
from torch import nn
from turns import compare, take_turns

import autopar
from autopar.errors import BudgetError
from autopar.ir.plan_data import BACKENDS
from autopar.profile.timing import seconds_per_call

WARM, STEPS = 3, 9  # of a program that is compared with its plan
FRACTIONS = (0.75, 0.5, 0.25, 0.0)  # of torch's activation_memory_budget


class Bench:
    """The models on one device, and how they are trained and measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.float32 if options.small else torch.bfloat16

    def has_graphs(self, backend: str) -> bool:
        """Whether programs can run as CUDA graphs."""
        return self.device.type == "cuda" and backend == "inductor"

    def model(self, name: str, dtype: torch.dtype) -> tuple[nn.Module, Sample]:
        given = name, self.options.small, self.device, dtype
        return build(*given), sample(*given)

    def ours(self, name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Sample]:
        """The program of one rank of the model."""
        model, batch = self.model(name, dtype)
        options.setdefault("cluster", "cpu" if self.device.type == "cpu" else self.options.cluster)
        return autopar.compile(model, batch, 1, progress=False, **options), batch

    def step(self, model: nn.Module, batch: Sample) -> Callable[[], torch.Tensor]:
        """A training step of ``model``, run twice: it compiles, and the optimizer has its state."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step(), step()
        return step

    def seconds(self, step: Callable[[], torch.Tensor]) -> float:
        return seconds_per_call(step, self.options.steps, self.device)

    def turns(self, steps: dict[str, Callable[[], torch.Tensor]], label: str) -> dict[str, float]:
        """The steps "plain" and "ours", measured in turns."""
        timers = {name: partial(self.seconds, step) for name, step in steps.items()}
        return compare(take_turns(timers, self.options.repeats, label), "plain", "ours")

    def peak(self, step: Callable[[], Any]) -> float:
        """The most bytes that a step holds beyond those held before it."""
        if self.device.type == "cpu":
            return peak_bytes(step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def free(self) -> None:
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# -- the parts: each gives rows for one model ------------------------------------------------------


def steps(bench: Bench, name: str) -> Iterator[Row]:
    """A training step of one rank, beside the plain model and beside ``torch.compile``; on a GPU
    also with CUDA graphs, beside torch's.
    """
    for backend in bench.options.backends:
        for mode in (None, "reduce-overhead") if bench.has_graphs(backend) else (None,):
            options = dict(backend=backend, recompute="none", cuda_graphs=mode is not None)
            ours = bench.step(*bench.ours(name, bench.dtype, **options))
            model, batch = bench.model(name, bench.dtype)
            plain = torch.compile(model, mode=mode) if backend == "inductor" else model
            both = {"plain": bench.step(plain, batch), "ours": ours}  # type: ignore[arg-type]
            found = bench.turns(both, f"{name}, {backend}")
            other = "torch.compile(model)" if backend == "inductor" else "eager model"
            both_as = f"{backend} program to {other}" + ", both with CUDA graphs" * bool(mode)
            yield _row("step", name, both_as, found)
            del ours, plain, both, model
            bench.free()


def frontier(bench: Bench, name: str) -> Iterator[Row]:
    """The time within the memory of a step that torch takes under each of its budgets."""
    for fraction in FRACTIONS[:1] if bench.options.small else FRACTIONS:
        model, batch = bench.model(name, bench.dtype)
        with functorch_config.patch(activation_memory_budget=fraction):
            plain = bench.step(torch.compile(model), batch)  # type: ignore[arg-type]
        taken = bench.peak(plain)
        lasting = sum(p.nbytes for p in model.parameters()) * 3  # with AdamW's two moments
        case = f"activation_memory_budget={fraction:g}, {taken / 2**20:.0f} MiB of a step"
        options = dict(backend="inductor", memory_budget=lasting + taken)
        try:
            program, batch = bench.ours(name, bench.dtype, **options)
        except BudgetError as e:
            yield Row("frontier", name, case, error=f"no plan; the least is {e.least:,.0f} bytes")
            continue
        ours = bench.step(program, batch)
        yield _row(
            "frontier", name, f"seconds, {case}", bench.turns({"plain": plain, "ours": ours}, case)
        )
        mine = bench.peak(ours)
        yield Row("frontier", name, f"bytes, {case}", "bytes", taken, mine, mine / taken)
        del plain, ours, program, model
        bench.free()


def predictions(bench: Bench, name: str) -> Iterator[Row]:
    """Predicted beside measured, in mixed precision, of a plan for the profile of this device."""
    for backend in bench.options.backends:
        options = dict(cluster=bench.options.profile, precision="bf16", backend=backend)
        program, batch = bench.ours(name, torch.float32, **options)
        step = bench.step(program, batch)
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM + STEPS):
            step()
        counts = (
            bench.device.type == "cpu" and backend == "eager"
        )  # a GPU's allocator counts itself
        found = program.compare(batch if counts else None)
        for row in found.rows:
            is_memory = row.what == "peak memory" and row.measured is not None
            if (row.where, row.what) == ("step", "total") or is_memory:
                unit = "bytes" if is_memory else "s"
                numbers = unit, row.predicted, row.measured, row.ratio
                yield Row("prediction", name, f"{backend}, {row.what}", *numbers)
        del program, step
        bench.free()


def rehearsals(bench: Bench, name: str) -> Iterator[Row]:
    """Rank 0 of a plan for more GPUs: what it computes in a step, and its peak memory."""
    options, small = bench.options, bench.options.small
    if dist.is_initialized():  # a rehearsal has a group of its own
        dist.destroy_process_group()
    for backend in options.backends:
        plan = REHEARSED[name].plan(options.plans, options.cluster, backend, small)
        given = *REHEARSED[name].made(small), 0
        found = plan.rehearse(*given, device=bench.device, progress=False)
        for row in (found.row("total"), found.row("peak memory")):
            unit = "bytes" if row.what == "peak memory" else "s"
            case = f"{REHEARSED[name].gpus} GPUs, {backend}, {row.what}"
            yield Row("rehearsal", name, case, unit, row.predicted, row.measured, row.ratio)
        bench.free()


def _row(part: str, model: str, case: str, found: dict[str, float]) -> Row:
    numbers = found["reference"], found["seconds"], found["ratio"], found["low"], found["high"]
    return Row(part, model, case, "s", *numbers)


PARTS: dict[str, Callable[[Bench, str], Iterator[Row]]] = {
    "step": steps,
    "frontier": frontier,
    "prediction": predictions,
    "rehearsal": rehearsals,
}


def rows_of(part: str, bench: Bench, model: str) -> Iterator[Row]:
    """The rows of one part, and where it fails a row that says why."""
    try:
        yield from PARTS[part](bench, model)
    except Exception as e:  # the parts that follow are worth having
        text = " ".join(f"{type(e).__name__}: {e}".split())
        yield Row(part, model, "failed", error=text)
        print(f"{part} of {model} failed: {text}", file=sys.stderr)
    finally:
        bench.free()


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--small", action="store_true", help="models of one narrow layer, float32")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=[*BACKENDS])
    parser.add_argument("--rehearsals", nargs="*", choices=[*REHEARSED], default=[*REHEARSED])
    parser.add_argument("--plans", type=Path, default=Path("gpu-plans"), help="of the rehearsals")
    parser.add_argument("--cluster", default="h100-sxm", help="of plans for a GPU not profiled")
    parser.add_argument("--profile", type=Path, default=Path("gpu-cluster.json"))
    parser.add_argument("--profile-seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=5, help="steps in one turn")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each variant")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    return parser.parse_args(given)


def main(asked: Sequence[str] | None = None) -> int:
    options = arguments(asked)
    if options.device == "cpu":
        one_thread_a_rank()
        torch.set_num_threads(1)  # the "cpu" cluster's device is one core
    bench, rows = Bench(options), list[Row]()
    if "prediction" in options.parts and not options.profile.exists():
        shown = sys.stderr.isatty()
        given = options.profile, options.device, shown, options.profile_seconds
        autopar.Cluster.measure(*given)
    for part in options.parts:
        for model in options.rehearsals if part == "rehearsal" else options.models:
            for row in rows_of(part, bench, model):
                rows.append(row)
                write(options.out, rows, bench.device, options.small)
    print(f"\n{table(rows)}\n\nwritten to {options.out}")
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
