"""check(): whether the captured graph and the plan compute what the model does on one device."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import get_context
from torch.utils import _pytree as pytree

from autopar.api import compile as compile_plan
from autopar.capture.sample_call import sample_arguments
from autopar.errors import AutoparError, RunError
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import LossFunction
from autopar.ir.nodes import arguments
from autopar.plan import Plan
from autopar.verification.differences import Difference, StepResults, differences
from autopar.verification.one_step import eager_step
from autopar.verification.whole_batch import check_captured, not_comparable


@dataclass(frozen=True)
class Checked:
    """The comparisons that :func:`check` made.

    Attributes:
        captured: the captured graph compared with the model.
        ranks: the step of each rank compared with the step of one device.
    """

    captured: tuple[Difference, ...]
    ranks: tuple[tuple[Difference, ...], ...] = ()

    def __str__(self) -> str:
        lines = [_summary("captured graph", self.captured)]
        lines += [
            _summary(f"rank {rank} of {len(self.ranks)}", found)
            for rank, found in enumerate(self.ranks)
        ]
        return "\n".join(lines)


def check(
    model: nn.Module,
    sample_input: Any,
    *,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    world_size: int | None = None,
    timeout: float = 300.0,
    **options: Any,
) -> Checked:
    """Compare the program that autopar would run with ``model``.

    The comparison covers the loss, outputs, gradients of parameters and new values of buffers. It
    compares the captured graph with the model on the whole sample. With ``plan`` or ``world_size``
    (and options of :func:`compile`) the plan also runs one step on that many local CPU processes,
    which communicate over the loopback interface, and each rank is compared with the model on one
    device. A model that draws random numbers is refused then, because the ranks draw other numbers
    than one device. The model stays unchanged.

    Args:
        model, sample_input, loss_fn: as for :func:`compile`, with values. For processes they must
            be picklable, and the calling script must guard its main part by ``if __name__ ==
            "__main__":``.
        plan: a plan to run; otherwise the options decide.
        world_size: the number of processes, where no plan is given.
        timeout: seconds that the processes may take.

    Raises:
        CaptureError: the captured graph is not what the model computes; the message names the first
            module that differs.
        RunError: there are no values to compare, a rank failed or took too long, or its step
            differs from the step of one device.
    """
    traced = TracedModel(model, sample_input, loss_fn)
    if problem := not_comparable(traced.whole, model, traced.sample):
        raise RunError(
            f"check: {problem}, so there is nothing to compare: give a model and a sample with "
            "values, and fewer samples if need be"
        )
    captured = tuple(check_captured(traced.whole, model, traced.sample, loss_fn))
    if plan is None and world_size is None:
        return Checked(captured)
    _check_deterministic(traced)
    size = plan.world_size if plan else int(world_size or 1)
    ranks = _run_plan(model, traced.sample, loss_fn, plan, size, timeout, options)
    _check_ranks(ranks)
    return Checked(captured, tuple(ranks))


def _check_deterministic(traced: TracedModel) -> None:
    """Raises RunError for a graph that draws random numbers."""
    for node in traced.whole.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_random and _draws(node):
            raise RunError(
                f"check: {node.target} draws random numbers, and a program draws others than one "
                "device: set dropout to 0"
            )


def _check_ranks(ranks: list[tuple[Difference, ...]]) -> None:
    """Raises RunError where the step of a rank differs from the step of one device."""
    for rank, found in enumerate(ranks):
        if wrong := [d for d in found if not d.is_allowed]:
            first = max(wrong, key=lambda d: d.error)
            raise RunError(
                f"check: on rank {rank} of {len(ranks)} {first.name} is {first.found}, on one "
                f"device {first.expected} "
                f"(error {first.error:.1e}, allowed {first.allowed:.0e}); {len(wrong)} of "
                f"{len(found)} things compared differ"
            )


def _draws(node: Any) -> bool:
    """Whether a random operator draws numbers with these arguments."""
    aten, found = torch.ops.aten, arguments(node)
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(found["dropout_p"])
    if "p" in found and "train" in found:
        return bool(found["p"] and found["train"])
    return True


def _run_plan(
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None,
    plan: Plan | None,
    ranks: int,
    timeout: float,
    options: dict[str, Any],
) -> list[tuple[Difference, ...]]:
    """Runs one step on ``ranks`` processes. Returns the comparison of each."""
    try:
        job = pickle.dumps((model, sample, loss_fn, plan, options))
    except Exception as e:
        raise RunError(
            "check: model, sample, loss_fn and options go to other processes, and cannot be "
            f"pickled: {e}"
        ) from e
    with tempfile.TemporaryDirectory(prefix="autopar-check-") as folder:
        late = _run_processes(ranks, folder, job, timeout)
        answers = [_answer(os.path.join(folder, f"rank{rank}")) for rank in range(ranks)]
    if late:
        raise RunError(
            f"check: no answer from ranks {late} of {ranks} within {timeout:g} s: give timeout= "
            "more, or a smaller sample"
        )
    for rank, answer in enumerate(answers):
        if not isinstance(answer, list):
            raise RunError(
                f"check: rank {rank} of {ranks} failed: {answer or 'it ended without an answer'}"
            )
    return [tuple(answer) for answer in answers if isinstance(answer, list)]


def _run_processes(ranks: int, folder: str, job: bytes, timeout: float) -> list[int]:
    """Runs the processes until they end. Returns the ranks that were too slow and were killed."""
    context = get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, ranks, folder, job, timeout), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _answer(path: str) -> list[Difference] | str:
    """The comparison that a process wrote, or the text of its error; "" for no answer."""
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        return pickle.load(file)  # type: ignore[no-any-return]


def _rank(rank: int, ranks: int, folder: str, job: bytes, timeout: float) -> None:
    """The main function of one process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    torch.set_num_threads(1)
    answer: list[Difference] | str
    try:
        store = dist.FileStore(os.path.join(folder, "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        answer = _step(ranks, *pickle.loads(job))
    except AutoparError as e:
        answer = f"{type(e).__name__}: {e}"
    except Exception:
        answer = traceback.format_exc()
    with open(os.path.join(folder, f"rank{rank}.part"), "wb") as file:
        pickle.dump(answer, file)
    os.replace(file.name, os.path.join(folder, f"rank{rank}"))
    if dist.is_initialized():
        dist.destroy_process_group()


def _step(
    ranks: int,
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None,
    plan: Plan | None,
    options: dict[str, Any],
) -> list[Any]:
    """Runs one step of the program and one of the model. Returns their comparison."""
    captured = TracedModel(model, sample, loss_fn).whole
    given = {"plan": plan} if plan is not None else options
    compiled = compile_plan(
        copy.deepcopy(model), sample, ranks, loss_fn=loss_fn, progress=False, verify=False, **given
    )
    args, kwargs = sample_arguments(sample)
    leaves = pytree.tree_leaves(compiled(*args, **kwargs))
    loss = leaves[captured.loss]
    outputs = {"loss": loss.detach()}
    outputs |= {
        f"output {i}": _whole(t.detach())
        for i, t in enumerate(leaves)
        if isinstance(t, torch.Tensor) and i != captured.loss
    }
    loss.backward()
    gradients = {
        name: None if p.grad is None else _whole(p.grad)
        for name, p in compiled.named_parameters()
        if p.requires_grad
    }
    made = StepResults(
        outputs, gradients, {name: _whole(b) for name, b in compiled.named_buffers()}
    )
    expected = eager_step(captured, model, sample, loss_fn)
    # A pipeline rank has only the parameters of its stages.
    kept = {name: g for name, g in expected.gradients.items() if name in gradients}
    return differences(made, StepResults(expected.outputs, kept, expected.buffers))


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.to_dense() if t.is_sparse else t


def _summary(what: str, found: tuple[Difference, ...]) -> str:
    worst = max(found, key=lambda d: d.error / max(d.allowed, 1e-300))
    return (
        f"{what}: {len(found)} values compared, the largest difference {worst.error:.1e} "
        f"({worst.name}; allowed {worst.allowed:.0e})"
    )
