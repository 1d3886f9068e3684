"""Plan.rehearse(): one rank's program, run alone on the device at hand."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.api import program_of_plan
from autopar.capture.sample_call import sample_arguments
from autopar.cost_model.memory import FUSED
from autopar.errors import AutoparError, RunError
from autopar.formatting.table import format_bytes
from autopar.frontend.planner import model_device
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import LossFunction
from autopar.ir.plan_json import validated_plan
from autopar.ir.schedules import stages_of_rank
from autopar.plan import Plan
from autopar.runtime.communication.stand_ins import BACKEND, fill
from autopar.runtime.dtensors.torch_private import forget_meshes
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.measure.rank_memory import lasting_bytes, storages_on_host
from autopar.runtime.measure.rehearsal import Rehearsal, rehearsed_rows
from autopar.runtime.measure.step_recorder import FIRST, WARM_UP, RankTimes
from autopar.runtime.module.compiled import Compiled

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def rehearse(
    plan: Plan,
    model: nn.Module,
    sample_input: Any,
    rank: int = 0,
    *,
    loss_fn: LossFunction | None = None,
    device: str | torch.device | None = None,
    steps: int = 5,
    progress: bool = True,
) -> Rehearsal:
    """See :meth:`Plan.rehearse`."""
    found = _checked(plan, model, rank, device, steps)
    traced = TracedModel(model, sample_input, loss_fn, plan.precision)
    gpus = [found] if found.type == "cuda" else []
    try:
        with (
            torch.cuda.device(found) if gpus else nullcontext(),
            torch.random.fork_rng(gpus),
            torch.enable_grad(),
            _alone(rank, plan.world_size),
        ):
            times, lasting = _measured(plan, traced, found, steps, progress)
    except AutoparError:
        raise
    except torch.OutOfMemoryError as e:
        raise RunError(_no_memory(plan, rank, found)) from e
    except Exception as e:
        raise RunError(_failed(plan, rank, e)) from e
    return Rehearsal(
        rank,
        plan.world_size,
        plan.cluster,
        _device_name(found),
        plan.backend_on(found.type),
        times.steps,
        rehearsed_rows(plan, rank, times, lasting),
        tuple(_notes(plan, model, found)),
    )


def _checked(
    plan: Plan, model: nn.Module, rank: int, device: str | torch.device | None, steps: int
) -> torch.device:
    """The device of the rehearsal. Raises an error for arguments that are wrong."""
    validated_plan(plan, Plan)
    # The recorder records so many steps one after the other.
    for name, value, least, most in (
        ("rank", rank, 0, plan.world_size - 1),
        ("steps", steps, 1, FIRST),
    ):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= most:
            raise RunError(
                f"rehearse: {name}={value!r:.50}: give a whole number from {least} to {most}"
            )
    if dist.is_initialized():
        raise RunError(
            f"rehearse: this process has a {dist.get_backend()} process group of "
            f"{dist.get_world_size()} ranks, and a rehearsal makes one of its own, on which no "
            "rank answers: rehearse in a process of its own, or before init_process_group"
        )
    found = model_device(model)
    if device is not None:
        try:
            found = torch.device(device)
        except RuntimeError as e:
            raise RunError(f'rehearse: device={device!r:.50}: give "cpu" or "cuda"') from e
    elif found.type == "meta":
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type not in ("cpu", "cuda"):
        raise RunError(f'rehearse: device={str(found)!r}: give "cpu" or "cuda"')
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError('rehearse: device="cuda", and torch finds no GPU here: give device="cpu"')
    number = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", number)


@contextmanager
def _alone(rank: int, ranks: int) -> Iterator[None]:
    """A context with torch's fake process group of so many ranks. Nothing of it is left behind."""
    dist.init_process_group(BACKEND, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        gc.collect()  # a program ends with its last reference, and some of them are circles
        dist.destroy_process_group()
        forget_meshes()


def _measured(
    plan: Plan, traced: TracedModel, device: torch.device, steps: int, progress: bool
) -> tuple[RankTimes, dict[str, int]]:
    """The times and the peak memory of the rank, and the bytes that stay between its steps."""
    gc.collect()  # what is freed later must not count as held before
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    # Counting slows operators down, so that other steps are timed.
    counts = device.type == "cpu" and plan.backend_on("cpu") == "eager"
    peak = None
    with LiveBytes() if counts else nullcontext() as live:
        step = _Step(plan, traced, device, progress)
        recorder = step.program.mesh.recorder
        with recorder.paused():
            for _ in range(WARM_UP):  # the first one makes the state of the optimizer
                if live is not None:
                    live.uncounted |= storages_on_host(step.optimizer)
                    live.start()
                step.run().item()
            peak = None if live is None else live.peak
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP + steps):
        loss = step.run()
    recorder.begin(trains=True)  # the last step ends where the next one would begin
    loss.item()
    mesh = step.program.mesh
    own = stages_of_rank(mesh.pipeline_rank, len(plan.stages), mesh.pipeline)
    times = recorder.times(mesh.pipeline_rank, own, peak)
    if times.nbytes is not None:  # on a GPU with what the process held before
        times = replace(times, nbytes=times.nbytes - before)
    return times, lasting_bytes(step.program, step.optimizer, step.batch)


class _Step:
    """A training step of a plan's program on this rank.

    Attributes: ``program``; ``batch``, what the rank passes to it; ``optimizer``, which the plan
    counts with (None: the rank has no parameters).
    """

    def __init__(
        self, plan: Plan, traced: TracedModel, device: torch.device, progress: bool
    ) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the model is on the meta device")
            self.program: Compiled = program_of_plan(traced, plan, [], device, progress).train()
        self.program._state.fill_missing()
        self.batch = tree_map_only(torch.Tensor, self._own_part, traced.sample)
        self._arguments = sample_arguments(self.batch)
        name = str(plan.options.get("optimizer", "adamw"))
        parameters = list(self.program.parameters())
        made = partial(_OPTIMIZERS[name.removeprefix(FUSED)], parameters, lr=0.0)
        self.optimizer: torch.optim.Optimizer | None = None
        if parameters:
            self.optimizer = made(fused=True) if name.startswith(FUSED) else made()

    def _own_part(self, given: torch.Tensor) -> torch.Tensor:
        """This rank's samples of a tensor of the global batch, with stand-ins for values that it
        has not.
        """
        own, device = (
            self.program.samples_of(given, self.program.data_rank),
            self.program.mesh.device,
        )
        value = fill(torch.empty_like(own, device=device)) if own.is_meta else own.detach().clone()
        return value.to(device).requires_grad_(given.requires_grad)

    def run(self) -> torch.Tensor:
        """One step. Returns the loss."""
        args, kwargs = self._arguments
        loss = self.program._output_structure.loss_of(self.program(*args, **kwargs))
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def _failed(plan: Plan, rank: int, e: Exception) -> str:
    return (
        f"rehearse: the program of rank {rank} of {plan.world_size} fails without the other ranks, "
        f"{type(e).__name__}: {e}. What it receives from them is random numbers, and zeros in "
        "place of integers: a program whose control flow depends on received values cannot be "
        "rehearsed. A sample on the meta device is replaced in the same way: give one with values"
    )


def _no_memory(plan: Plan, rank: int, device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    found = f"{format_bytes(total)}, of which {format_bytes(free)} were free"
    most = f"the plan for {plan.cluster} predicts at most {format_bytes(max(plan.peak_memory))}"
    return (
        f"rehearse: rank {rank} does not fit {_device_name(device)} with {found}; {most} a device: "
        "rehearse on a device with more memory, with the model on the meta device, or plan with a "
        "smaller memory_budget"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"a CPU with {threads} thread{'s' * (threads > 1)}"


def _notes(plan: Plan, model: nn.Module, device: torch.device) -> Iterator[str]:
    backend = plan.backend_on(device.type)
    if backend != plan.backend:
        yield f"the plan is for {plan.backend}, which was left free: on a CPU it runs {backend}"
    if backend == "inductor" and device.type == "cpu":
        yield "memory was not measured: on a CPU no allocator counts what compiled code takes"
    if any(t.is_meta for t in tree_leaves([*model.parameters(), *model.buffers()])):
        yield "the model is on the meta device, so its parameters were random numbers"
