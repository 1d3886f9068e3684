"""Pipeline schedules: with ``torch_schedules`` the only file that names
``torch.distributed.pipelining``.

torch's schedules decide the order of work and when to communicate, and ask a stage to do both.
torch's stage makes buffers for every microbatch beforehand and keeps the tensors that it sent until
the backward, so it holds its boundary for all microbatches of a step, whatever the schedule. The
stage here keeps a received tensor only as long as autograd needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from autopar.errors import RunError
from autopar.runtime.communication.functional import as_message
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.stand_ins import runs_alone, stand_in
from autopar.runtime.pipeline.stage_backward import MicrobatchBackward, StageEntry
from autopar.runtime.pipeline.torch_schedules import make_schedule

if TYPE_CHECKING:
    from autopar.passes.lowering.split_stages import BoundaryTensor

# (stage, microbatch, received tensors) -> (tensors to send, the last stage's share of the loss)
StageForward = Callable[
    [int, int, list[torch.Tensor]], tuple[list[torch.Tensor], torch.Tensor | None]
]


@dataclass(frozen=True)
class StageBoundary:
    """One stage of this rank: its place in the model, the tensors that it receives, and those that
    it sends.
    """

    index: int
    received: tuple[BoundaryTensor, ...]
    sent: tuple[BoundaryTensor, ...]


class ScheduleRunner:
    """Runs this rank's stages by a schedule.

    Args:
        schedule: the name of a built-in or registered one.
        microbatches: of a step.
        stages: in the whole pipeline.
        boundaries: this rank's stages.
        forward: computes a stage. Gradients of parameters accumulate in the leaves that it uses.
        on_last_backward: is called with a stage before its last backward of a step.
    """

    def __init__(
        self,
        schedule: str,
        microbatches: int,
        stages: int,
        boundaries: Sequence[StageBoundary],
        mesh: Mesh,
        forward: StageForward,
        on_last_backward: Callable[[int], None],
    ) -> None:
        self._name, self._microbatches, self._mesh = schedule, microbatches, mesh
        self._boundaries, self._stage_count = boundaries, stages
        self._forward, self._on_last_backward = forward, on_last_backward
        self._schedule: Any = None
        self._stages: list[_Stage] = []
        self._failed = False
        # torch computes no loss without targets
        self._targets = torch.arange(microbatches, device="cpu")

    def check(self) -> None:
        """Raises :class:`RunError` after a step that failed."""
        if self._failed:
            raise RunError(
                "an earlier step failed midway, so that what the ranks of the pipeline sent each "
                "other no longer fits together: start the processes again, from the last checkpoint"
            )

    def run(self, backward: bool, returned: Collection[BoundaryTensor] = ()) -> None:
        """One step, or only its forwards without ``backward``. A gradient comes back for the
        tensors ``returned``, the same on all ranks. An error leaves the ranks out of step: no other
        run can follow.
        """
        self.check()
        if self._schedule is None:
            self._schedule = self._make_schedule()
        for stage in self._stages:
            stage.set_returned(returned)
        step = self._schedule.step if backward else self._schedule.eval
        since = self._mesh.recorder.mark()
        try:
            step(target=self._targets, return_outputs=False)
            for stage in self._stages:
                stage.release_messages()
            self._mesh.recorder.add("schedule", since)
        except BaseException:
            self._failed, self._schedule = True, None
            raise

    def _make_schedule(self) -> Any:
        sizes = self._stage_count, self._microbatches
        calls = self._forward, self._on_last_backward
        self._stages = [_Stage(b, *sizes, self._mesh, *calls) for b in self._boundaries]
        return make_schedule(self._name, self._stages, self._mesh.pipeline, self._microbatches)


class _Stage(PipelineStage):
    """A stage of this rank as torch's schedules ask for it."""

    def __init__(
        self,
        boundary: StageBoundary,
        stages: int,
        microbatches: int,
        mesh: Mesh,
        forward: StageForward,
        on_last_backward: Callable[[int], None],
    ) -> None:
        group, index = mesh.pipeline_group(), boundary.index
        super().__init__(
            nn.Module(), index, stages, mesh.device, input_args=(), output_args=(), group=group
        )
        self._boundary, self._microbatches = boundary, microbatches
        self._forward, self._on_last_backward = forward, on_last_backward
        self._group, self._mesh, self._recorder = group, mesh, mesh.recorder
        self._previous, self._next = (mesh.rank_of_stage(index + step) for step in (-1, 1))
        # A group numbers its ranks in rising order, which need not be that of the pipeline.
        self.group_rank = mesh.pipeline_rank
        self.set_returned(())
        self.clear_runtime_states()

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """torch warms up the links to other stages, and asks for their ranks."""
        return self._mesh.rank_of_stage(stage_idx)

    def set_returned(self, returned: Collection[BoundaryTensor]) -> None:
        """From now on a gradient comes back for these tensors alone."""
        self._with_gradient = returned
        self._gradients_sent = [t for t in self._boundary.received if t in returned]
        self._gradients_received = [t for t in self._boundary.sent if t in returned]

    def clear_runtime_states(self) -> None:
        """Called by torch's schedules before each step."""
        # By microbatch: tensors that arrived, those to send, and what the backward needs and sends.
        self._received: dict[int, list[torch.Tensor]] = {}
        self._to_send: dict[int, list[torch.Tensor]] = {}
        self._backwards: dict[int, MicrobatchBackward] = {}
        self._to_return: dict[int, list[torch.Tensor]] = {}
        self._messages: list[dist.P2POp] = []
        self._backwards_begun = 0

    # torch prepares buffers in these methods and asks other ranks for shapes. Here nothing is
    # prepared, and gradients are synchronised by the caller of the pipeline.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.args_recv_info = {0: ()}
        self.act_send_info = {}
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def perform_reduce_grad(self, *args: Any) -> None:
        """Does nothing."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._received[fwd_chunk_id] = buffers = self._buffers(self._boundary.received)
        return self._message(dist.irecv, buffers, self._previous)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._message(dist.isend, self._to_send.pop(fwd_chunk_id), self._next)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        buffers = self._buffers(self._gradients_received)
        self._backwards[bwd_chunk_id].gradients = buffers
        return self._message(dist.irecv, buffers, self._next)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        return self._message(dist.isend, self._to_return.pop(bwd_chunk_id), self._previous)

    def _buffers(self, tensors: Sequence[BoundaryTensor]) -> list[torch.Tensor]:
        return [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in tensors]

    def _message(
        self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor], peer: int
    ) -> list[dist.P2POp]:
        messages = [dist.P2POp(operation, as_message(t), peer, self._group) for t in tensors]
        if runs_alone():
            stand_in(messages)
        self._messages += messages
        return messages

    def release_messages(self) -> None:
        """Drops the tensors of all messages so far: work begins, or the schedule is done, so they
        are on their way, and a sender keeps what it must. A schedule keeps its messages, with their
        tensors, until the next ones of the same kind.
        """
        for message in self._messages:
            del message.tensor
        self._messages = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Computes the forward of a microbatch. Returns the share of the loss in the last stage."""
        self.release_messages()
        received = self._received.pop(fwd_chunk_id, [])
        inbox: list[torch.Tensor | None] = [None] * len(self._gradients_sent)
        inputs: list[GradientEdge] = []
        if self.has_backward and self._gradients_sent:
            received, inputs = self._enter(received, inbox)
        since = self._recorder.begin_compute("forward", self.stage_index)
        sent, loss = self._forward(self.stage_index, fwd_chunk_id, received)
        self._recorder.end_compute(since)
        del received
        self._to_send[fwd_chunk_id] = [x.detach().contiguous() for x in sent]
        if self.has_backward:
            pairs = zip(sent, self._boundary.sent, strict=True)
            outputs = [x for x, t in pairs if t in self._with_gradient] if loss is None else [loss]
            self._backwards[fwd_chunk_id] = made = MicrobatchBackward(outputs, inputs, inbox)
            made.gradients = [] if loss is None else [torch.ones_like(loss)]
        return loss if loss is None else loss.detach()

    def _enter(
        self, received: list[torch.Tensor], inbox: list[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[GradientEdge]]:
        """``received``, with those tensors that have a gradient as outputs of a
        :class:`StageEntry`, and the edges of these.
        """
        has_gradient = [t in self._with_gradient for t in self._boundary.received]
        entering = [x for x, has in zip(received, has_gradient, strict=True) if has]
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        entered = StageEntry.apply(anchor, inbox, *entering)
        edges = [get_gradient_edge(x) for x in entered]
        outputs = iter(entered)
        return [
            next(outputs) if has else x for x, has in zip(received, has_gradient, strict=True)
        ], edges

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Computes the backward of a microbatch, or without ``full_backward`` its first part."""
        if not self.has_backward:
            return
        since = self._recorder.begin_compute("backward", self.stage_index)
        self.release_messages()
        backward = self._backwards[bwd_chunk_id]
        if full_backward:
            del self._backwards[bwd_chunk_id]
            self._count_backward()
            backward.run()
        else:
            backward.run_inputs()
        self._to_return[bwd_chunk_id] = [
            torch.zeros(t.shape, dtype=t.dtype, device=self.device) if g is None else g.contiguous()
            for g, t in zip(backward.take_input_gradients(), self._gradients_sent, strict=True)
        ]
        self._recorder.end_compute(since)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Computes the second part of a microbatch's backward."""
        if not self.has_backward:
            return
        since = self._recorder.begin_compute("backward", self.stage_index)
        backward = self._backwards.pop(bwd_chunk_id)
        self._count_backward()
        backward.run_leaves()
        self._recorder.end_compute(since)

    def _count_backward(self) -> None:
        self._backwards_begun += 1
        if self._backwards_begun == self._microbatches:
            self._on_last_backward(self.stage_index)
