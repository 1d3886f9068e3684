"""Pipeline schedules: the only file that names ``torch.distributed.pipelining``.

torch's schedules decide the order of work and when to communicate, and ask a stage to do it. The
stage here answers in its own way where torch's costs memory: that one makes buffers for every
microbatch beforehand and keeps what was sent until the backward, so that a stage holds its boundary
for all microbatches of a step, whatever the schedule. Here a received tensor lives as long as
autograd needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.pipeline.split_backward import SplitBackward

if TYPE_CHECKING:
    from autopar.passes.lowering.split_stages import BoundaryTensor

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}

StageForward = Callable[
    [int, int, list[torch.Tensor]], tuple[list[torch.Tensor], torch.Tensor | None]
]


@dataclass(frozen=True)
class StageBoundary:
    """One stage of this rank: its place in the model, what it receives and what it sends."""

    index: int
    received: tuple[BoundaryTensor, ...]
    sent: tuple[BoundaryTensor, ...]


class ScheduleRunner:
    """Runs the stages ``parts`` of this rank, of ``stages`` in the whole pipeline, by ``schedule``.

    ``forward(stage, microbatch, received)`` computes a stage: what it sends on, and in the last
    stage its share of the loss. Gradients of parameters accumulate in the leaves that it used;
    ``on_last_backward(stage)`` is called before the last backward of each stage.
    """

    def __init__(
        self,
        schedule: str,
        microbatches: int,
        stages: int,
        parts: Sequence[StageBoundary],
        mesh: Mesh,
        forward: StageForward,
        on_last_backward: Callable[[int], None],
    ) -> None:
        self._name, self._microbatches, self._mesh = schedule, microbatches, mesh
        self._parts, self._stages, self._forward, self._on_last_backward = (
            parts,
            stages,
            forward,
            on_last_backward,
        )
        self._schedule: Any = None
        self._made: list[_Stage] = []
        self._failed = False
        self._targets = torch.arange(microbatches)  # torch computes no loss without

    def check(self) -> None:
        """Raises :class:`RunError` after a step that failed."""
        if self._failed:
            raise RunError(
                "an earlier step failed midway, so that what the ranks of the pipeline sent each "
                "other no longer fits together: "
                "start the processes again, from the last checkpoint"
            )

    def run(self, backward: bool, returned: Collection[BoundaryTensor] = ()) -> None:
        """One step, or only its forwards; a gradient comes back for the crossings ``returned``, the
        same on all ranks. An error leaves the ranks out of step: there is no other run after it."""
        self.check()
        if self._schedule is None:
            self._made = stages = [
                _Stage(
                    part,
                    self._stages,
                    self._microbatches,
                    self._mesh,
                    self._forward,
                    self._on_last_backward,
                )
                for part in self._parts
            ]
            one = self._name in _SINGLE
            kind: Any = _SINGLE[self._name] if one else _SEVERAL[self._name]
            self._schedule = kind(
                stages[0] if one else stages,
                self._microbatches,
                loss_fn=lambda loss, _: loss,
                scale_grads=False,
            )
        for stage in self._made:
            stage.expect(returned)
        step = self._schedule.step if backward else self._schedule.eval
        since = self._mesh.recorder.mark()
        try:
            step(target=self._targets, return_outputs=False)
            for stage in self._made:
                stage.let_go()
            self._mesh.recorder.add("schedule", since)
        except BaseException:
            self._failed, self._schedule = True, None
            raise


class StageEntry(torch.autograd.Function):
    """Where a stage's graph begins: what came from the stage before. The gradients go to ``inbox``.

    Leaves would do, but autograd holds on to a leaf, also where nothing needs its value.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, inbox: list[torch.Tensor | None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inbox = inbox
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.inbox[:] = gradients
        return (None,) * (2 + len(gradients))


@dataclass
class _Pending:
    """What a microbatch has left for its backward."""

    roots: list[
        tuple[int, GradientEdge]
    ]  # by place among the tensors with gradients that were sent
    inputs: list[GradientEdge]
    inbox: list[torch.Tensor | None]
    gradients: list[torch.Tensor]  # of what was sent, or of the loss
    split: SplitBackward | None = None


class _Stage(PipelineStage):
    def __init__(
        self,
        part: StageBoundary,
        stages: int,
        microbatches: int,
        mesh: Mesh,
        forward: StageForward,
        on_last_backward: Callable[[int], None],
    ) -> None:
        group = mesh.pipeline_group()
        super().__init__(
            nn.Module(), part.index, stages, mesh.device, input_args=(), output_args=(), group=group
        )
        self._part, self._forward, self._on_last_backward, self._all = (
            part,
            forward,
            on_last_backward,
            microbatches,
        )
        self._group, self._recorder = group, mesh.recorder
        self._previous, self._next = (
            dist.get_global_rank(group, (part.index + step) % group.size()) for step in (-1, 1)
        )
        self.expect(())
        self.clear_runtime_states()

    def expect(self, returned: Collection[BoundaryTensor]) -> None:
        """From now on a gradient comes back for these crossings alone."""
        self._with_gradient = returned
        self._returned = [crossing for crossing in self._part.received if crossing in returned]
        self._expected = [crossing for crossing in self._part.sent if crossing in returned]

    def clear_runtime_states(self) -> None:
        self._arriving: dict[int, list[torch.Tensor]] = {}
        self._leaving: dict[int, list[torch.Tensor]] = {}
        self._pending: dict[int, _Pending] = {}
        self._answers: dict[int, list[torch.Tensor]] = {}
        self._messages: list[dist.P2POp] = []
        self._done = 0

    # torch prepares buffers here and asks other ranks for shapes; there is nothing to prepare.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.args_recv_info = {0: ()}
        self.act_send_info = {}
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def perform_reduce_grad(self, *args: Any) -> None:
        """Gradients are synchronised by whoever runs the pipeline."""

    # Communication

    def _receive(
        self, crossings: Sequence[BoundaryTensor], peer: int
    ) -> tuple[list[torch.Tensor], list[dist.P2POp]]:
        buffers = [torch.empty(c.shape, dtype=c.dtype, device=self.device) for c in crossings]
        return buffers, self._noted(
            [dist.P2POp(dist.irecv, buffer, peer, self._group) for buffer in buffers]
        )

    def _noted(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        self._messages += messages
        return messages

    def let_go(self) -> None:
        """Work begins, or the schedule is done: all messages so far are on their way, and a sender
        keeps what it must. Schedules keep the descriptions of messages until the next ones of their
        kind, with their tensors, unless these are taken away."""
        for message in self._messages:
            del message.tensor
        self._messages = []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._arriving[fwd_chunk_id], ops = self._receive(self._part.received, self._previous)
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted(
            [
                dist.P2POp(dist.isend, x, self._next, self._group)
                for x in self._leaving.pop(fwd_chunk_id)
            ]
        )

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        self._pending[bwd_chunk_id].gradients, ops = self._receive(self._expected, self._next)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        return self._noted(
            [
                dist.P2POp(dist.isend, x, self._previous, self._group)
                for x in self._answers.pop(bwd_chunk_id)
            ]
        )

    # Work

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.let_go()
        received = self._arriving.pop(fwd_chunk_id, [])
        inbox: list[torch.Tensor | None] = [None] * len(self._returned)
        inputs: list[GradientEdge] = []
        if self.has_backward and self._returned:
            own = [c in self._with_gradient for c in self._part.received]
            entering = [x for x, back in zip(received, own, strict=True) if back]
            entered = iter(StageEntry.apply(torch.zeros((), requires_grad=True), inbox, *entering))
            received = [next(entered) if back else x for x, back in zip(received, own, strict=True)]
            inputs = [get_gradient_edge(x) for x, back in zip(received, own, strict=True) if back]
            del entering, entered
        since = self._recorder.begin_compute("forward", self.stage_index)
        sent, loss = self._forward(self.stage_index, fwd_chunk_id, received)
        self._recorder.end_compute(since)
        del received
        self._leaving[fwd_chunk_id] = [x.detach().contiguous() for x in sent]
        if self.has_backward:
            ends = (
                [x for x, c in zip(sent, self._part.sent, strict=True) if c in self._with_gradient]
                if loss is None
                else [loss]
            )
            roots = [(i, get_gradient_edge(x)) for i, x in enumerate(ends) if x.requires_grad]
            gradients = [] if loss is None else [torch.ones_like(loss)]
            self._pending[fwd_chunk_id] = _Pending(roots, inputs, inbox, gradients)
        return loss if loss is None else loss.detach()

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not self.has_backward:
            return
        since = self._recorder.begin_compute("backward", self.stage_index)
        self.let_go()
        pending = self._pending[bwd_chunk_id]
        if full_backward:
            self._whole(self._pending.pop(bwd_chunk_id))
        elif pending.inputs:
            pending.split = SplitBackward(*self._roots(pending), pending.inputs)
            pending.inbox[:] = pending.split.inputs()
            pending.roots, pending.gradients = [], []
        # A stage that sends nothing back has all of its backward in the second part.
        self._answers[bwd_chunk_id] = [
            torch.zeros(c.shape, dtype=c.dtype, device=self.device) if g is None else g.contiguous()
            for g, c in zip(pending.inbox, self._returned, strict=True)
        ]
        pending.inbox.clear()
        self._recorder.end_compute(since)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        since = self._recorder.begin_compute("backward", self.stage_index)
        pending = self._pending.pop(bwd_chunk_id)
        if pending.split is None:
            self._whole(pending)
        else:
            self._count()
            pending.split.leaves()
        self._recorder.end_compute(since)

    def _whole(self, pending: _Pending) -> None:
        self._count()
        edges, gradients = self._roots(pending)
        pending.roots, pending.gradients = [], []
        if edges:
            torch.autograd.backward(edges, gradients)

    def _roots(self, pending: _Pending) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        return [edge for _, edge in pending.roots], [pending.gradients[i] for i, _ in pending.roots]

    def _count(self) -> None:
        self._done += 1
        if self._done == self._all:
            self._on_last_backward(self.stage_index)
