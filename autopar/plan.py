"""The plan that a user reads, edits, saves and loads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanError
from autopar.formatting.files import write_json, write_whole
from autopar.ir.plan_data import VERSION, PlanData
from autopar.ir.plan_json import read_plan, to_json_data
from autopar.report import chrome_trace, draw_timeline, report_text

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autopar.cost_model.caching_allocator import AllocatorStatistics
    from autopar.ir.captured import LossFunction
    from autopar.runtime.measure.rehearsal import Rehearsal


@dataclasses.dataclass(frozen=True)
class Plan(PlanData):
    """A distributed program for one model, one sample input and one cluster.

    The attributes are those of :class:`autopar.ir.plan_data.PlanData`.
    """

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """The same plan, with the methods that a user calls."""
        return cls(**{f.name: getattr(data, f.name) for f in dataclasses.fields(PlanData)})

    def report(self) -> str:
        """A text with the mesh, the layout of each block, the collectives, memory and time."""
        return report_text(self)

    def timeline(self) -> str:
        """The timeline of a step as text: one row for each pipeline rank, one letter a phase."""
        return draw_timeline(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of a step as a trace for Perfetto or Chrome.

        Where writing fails, ``path`` stays unchanged.
        """
        write_json(path, chrome_trace(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Where writing fails, ``path`` stays unchanged."""
        write_json(path, {"version": VERSION, **to_json_data(self)}, indent=1)

    def rehearse(
        self,
        model: nn.Module,
        sample_input: Any,
        rank: int = 0,
        *,
        loss_fn: LossFunction | None = None,
        device: str | torch.device | None = None,
        steps: int = 5,
        progress: bool = True,
    ) -> Rehearsal:
        """Run the program of one ``rank``, alone, for a plan of any size on the one device at hand.

        The rank compiles what it would compile, and trains a few steps of the whole batch. In place
        of communication it has buffers of the right shapes, on torch's ``fake`` process group. The
        result has the time of each part that computes, and the peak memory, beside the prediction.

        A rehearsal does not know: the time of communication, and what of it is hidden; what ranks
        lose where they share links, hosts or cores; the memory of the communication library; values
        (what a rank receives is random, so the loss means nothing). Kernels that communicate, such
        as ring attention, are timed without their messages. The learning rate is 0.

        Args:
            model, sample_input, loss_fn: as for :func:`autopar.plan`. The model stays unchanged. On
                the meta device, only this rank's part of it takes memory, and gets random values.
                Of a sample on the meta device, integers are zeros.
            rank: of the plan's world.
            device: "cpu" or "cuda"; by default the model's, and for the meta device a GPU if there
                is one. torch's peak statistics of a GPU are reset.
            steps: the number of steps to time, ten at most; four others precede them.
            progress: whether to show a progress bar where a program is compiled.

        Raises:
            RunError: this process has a process group; the model does not give the plan's graph;
                the rank does not fit the device; or its program depends on received values.
        """
        from autopar.rehearse import rehearse

        how: dict[str, Any] = dict(loss_fn=loss_fn, device=device, steps=steps, progress=progress)
        return rehearse(self, model, sample_input, rank, **how)

    def reserved_memory(
        self,
        model: nn.Module,
        sample_input: Any,
        *,
        loss_fn: LossFunction | None = None,
        expandable_segments: bool = False,
    ) -> AllocatorStatistics:
        """What torch's CUDA allocator reserves for the program of a rank, where ``peak_memory`` is
        what tensors hold: a simulation of the allocator over three steps, with nothing run.

        A GPU runs out of memory by what is reserved: by segments that hold tensors, and by free
        parts of them that fit no request. The allocations and frees are those that
        :attr:`peak_memory` counts, call by call, on one stream. Not counted: workspaces of cuBLAS
        and of collectives, the CUDA context, and what waits for another stream.

        Args:
            model, sample_input, loss_fn: as for :func:`autopar.plan`.
            expandable_segments: whether ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` is
                set.

        Returns:
            Bytes that are ``allocated`` and ``reserved`` at most. ``retries`` is 0, because no
            capacity is given: a plan whose reserved bytes fit a device fits it without retries.

        Raises:
            PlanError: the plan has several pipeline stages.
            RunError: the model does not give the plan's graph.
        """
        from autopar.reserved_memory import reserved_memory

        how: dict[str, Any] = dict(loss_fn=loss_fn, expandable_segments=expandable_segments)
        return reserved_memory(self, model, sample_input, **how)

    def write_problem(self, path: str | os.PathLike[str]) -> None:
        """Write the integer linear program of the plan's configuration for other solvers: as MPS
        or, where ``path`` ends with ".lp", in the LP format.

        The program has the price of memory that the plan was solved at. Vertices that need no
        variables have been eliminated from it. Where writing fails, ``path`` stays unchanged.

        Raises:
            PlanError: the plan was loaded or changed; or ``path`` has another ending.
        """
        write = self.__dict__.get("_write_program")
        if write is None:
            raise PlanError(
                "write_problem: this plan was loaded or changed, and its problem is not in it: "
                "call write_problem on what autopar.plan returns"
            )
        if not os.fsdecode(path).endswith((".mps", ".lp")):
            raise PlanError(f"path={path!r:.100}: give a path that ends with .mps or .lp")
        write_whole(path, write)

    def with_program(self, write: Callable[[str], None]) -> Plan:
        """The same plan, which can write its problem: ``write`` writes it to a path. It is no field
        of the plan, so that copies and files go without it.
        """
        plan = dataclasses.replace(self)
        object.__setattr__(plan, "_write_program", write)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the problem, which is not for other processes."""
        return {key: value for key, value in self.__dict__.items() if key != "_write_program"}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: the file cannot be read, holds no plan, has another version, or is damaged.
        """
        return read_plan(path, VERSION, Plan)
