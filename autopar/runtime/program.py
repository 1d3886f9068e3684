"""The module that a user trains: a lowered program, its parameters, and what happens in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.layout import P
from autopar.precision import dtype_of
from autopar.runtime import recompute
from autopar.runtime.agree import together
from autopar.runtime.clip import attend_clipping
from autopar.runtime.gather import Gather
from autopar.runtime.gradients import GradientSync
from autopar.runtime.holders import Holders
from autopar.runtime.loss import PendingLoss, finish, total
from autopar.runtime.mesh import Mesh
from autopar.runtime.microbatches import Parts, Release
from autopar.runtime.module_tree import build_tree, copy_tree
from autopar.runtime.optimizers import attend_steps
from autopar.runtime.parameters import State, as_dtensor, laid_like, stays
from autopar.runtime.peak import step_bytes
from autopar.runtime.recorder import TimedBackward, on_all_ranks
from autopar.runtime.signature import Results, Signature
from autopar.runtime.stages import Stages, first_use
from autopar.runtime.tensor_cores import TensorCores

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.passes.lower import Lowered
    from autopar.plan import Plan
    from autopar.report.compare import Comparison


class Compiled(nn.Module):
    """A model as a distributed program; called and trained like the model itself.

    The loss it returns is that of the whole batch on every rank; other outputs are DTensors. Parameters are DTensors that hold this
    rank's part, under the model's names; on a single device they are plain tensors. ``backward`` of the loss synchronises gradients. With
    several microbatches forward and backward run inside the call, unless gradients are off; other outputs have no gradient then, and
    ``backward`` of the loss releases the gradients. So they do under a pipeline, where each rank has the parameters of its own stages.

    Attributes: ``plan``; ``mesh``, that of the rank's stages; ``config``, the model's, if it has one.
    """

    def __init__(
        self, captured: Captured, plan: Plan, lowered: Lowered, mesh: Mesh, *, model: nn.Module | None = None, evaluates: bool = True
    ) -> None:
        super().__init__()
        self._evaluates = evaluates
        self._plan, self._mesh, self._lowered = plan, mesh, lowered
        self._signature = Signature(captured, mesh.device, plan.microbatches, lowered.input_batch_dims)
        self._results = Results(captured)
        holders = Holders(captured, lowered, mesh.pipeline) if lowered.stages else None
        keep = holders.of(mesh.pipeline_rank) if holders else None
        self._state = State(captured, plan, mesh, share_leaf=plan.microbatches == 1 and holders is None, keep=keep)
        self._updates = captured.updates
        self._tensor_cores = TensorCores(plan.precision == "tf32")
        self._elsewhere = {name for name in (*captured.state, *captured.aliases) if self._state.visible(name, captured.aliases) is None}
        self._place(captured, model)
        if model is not None:
            self.training = model.training
            if hasattr(model, "config"):
                self.config = model.config
        shares = [axis for axis, t in enumerate(lowered.output_layouts[self._results.loss]) if t is P and mesh.sizes[axis] > 1]
        self._loss_group = mesh.axes_group(shares) if shares else None
        self._loss: torch.Tensor | None = None  # the last one's sum, not itself: its graph leads here
        used = first_use(lowered.train.graph, dict(enumerate(lowered.state)))
        weights = [self._state.weights[name] for name in dict.fromkeys((*used, *lowered.state)) if name in self._state.weights]
        self._gather = Gather(weights, mesh)
        self._sync = GradientSync(
            () if holders else weights,  # stages have their own
            mesh,
            dtype=dtype_of(plan.reduce_dtype),
            always=self._tensor_cores.wanted,
            on_start=self._reopen,
            on_end=self._settle,
        )
        self._timed = TimedBackward(mesh.recorder)
        self._weights = weights
        self._parts = Parts(plan, lowered, self._results.loss) if plan.microbatches > 1 else None
        self._trains = any(tensor.requires_grad for tensor in captured.state.values())
        self._stages: Stages | None = None
        if holders:
            self._stages = Stages(plan, lowered, mesh, self._state.weights, self._parts, self._results.loss, holders)
            attend_clipping(self, self._state.weights.values(), mesh, holders)
        attend_steps(self, self.parameters(), [weight.leaf for weight in weights], mesh)

    def _place(self, captured: Captured, model: nn.Module | None) -> None:
        if model is not None:
            copy_tree(model, self, lambda name, _: self._state.visible(name, captured.aliases))
            return
        constants = {i.target for i in captured.inputs if i.kind == "constant"}
        names = [name for name in [*captured.state, *captured.aliases] if name not in constants]
        tensors = {name: self._state.visible(name, captured.aliases) for name in names}
        build_tree(self, {name: tensor for name, tensor in tensors.items() if tensor is not None}, names)

    @property
    def plan(self) -> Plan:
        """What was decided."""
        return self._plan

    @property
    def mesh(self) -> Mesh:
        """Where it runs."""
        return self._mesh

    def compare(self, sample: Any = None) -> Comparison:
        """What the steps so far took beside what the plan predicted, by kind, stage and device; the same on every rank. All ranks must
        call it, after six or more calls of an ordinary training loop. The step that is under way does not count.

        On a GPU its memory is the most that torch's allocator held in a step. A CPU keeps no such count: given a ``sample`` (a batch, in
        the form of the sample input), one forward and backward more runs with every tensor watched, and all is as before.

        Raises :class:`RunError` on every rank where one has seen too few steps.
        """
        from autopar.report.compare import compare

        peak = None
        if sample is not None and self._mesh.device.type == "cpu":
            peak = together("a step for its memory", lambda: step_bytes(self, self._mesh, self._results.loss_of, sample))
        own = range(self._mesh.pipeline_rank, len(self._plan.stages), self._mesh.pipeline)
        return compare(self._plan, on_all_ranks(self._mesh.recorder.times(self._mesh.pipeline_rank, own, peak)))

    def print_program(self) -> None:
        """Prints the program of one microbatch on this rank, as Python."""
        programs = self._stages.programs() if self._stages else [(self._lowered.train, self._lowered.evaluate)]
        for train, evaluate in programs:
            print((train if self.training else evaluate).print_readable(print_output=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a global batch of the sample's shapes, given whole to every rank.

        Raises :class:`RunError` for arguments unlike the sample's, and in ``eval()`` for a model that then computes something else.
        """
        if not (self.training or self._evaluates):
            raise RunError(
                "in eval() this model computes something else than in training, beyond dropout and BatchNorm (it reads self.training), "
                "and only its training was compiled: evaluate the plain model, loaded from state_dict()"
            )
        inputs = self._signature.bind(args, kwargs)
        self._mesh.streams.next_step()
        self._mesh.recorder.begin(self.training and self._trains and torch.is_grad_enabled())
        self._settle()
        with self._tensor_cores:
            return self._step(inputs)

    def _step(self, inputs: list[torch.Tensor]) -> Any:
        self._refresh()
        self._gather.open()
        if self._stages is not None:
            return self._results.build(self._staged(self._stages, inputs))
        state = [self._state.argument(name) for name in self._lowered.state]
        extra = self._counted(inputs)
        outputs = self._whole(state, inputs, extra) if self._parts is None else self._in_parts(self._parts, state, inputs, extra)
        if not any(output.requires_grad for output in outputs):
            self._gather.close()
        return self._results.build(self._presented(outputs))

    def _counted(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """What each microbatch must know of all of them."""
        prologue = self._lowered.prologue
        if prologue is None:
            return []
        # It counts over the whole batch on every rank, so it takes class weights whole, however the graph cuts them.
        placeholders = [n for n in prologue.graph.nodes if n.op == "placeholder"][1:]
        state = [self._entire(name) if p.users else None for name, p in zip(self._lowered.state, placeholders, strict=False)]
        with torch.no_grad():
            counts = [prologue(self._mesh, *state, *self._select(inputs, part)) for part in range(self._plan.microbatches)]
            return [torch.stack(values).sum(0) for values in zip(*counts, strict=True)]

    def _entire(self, name: str) -> torch.Tensor:
        """A tensor of the state, whole, as the graph takes it."""
        if name in self._state.buffers:
            return self._state.buffers[name]
        weight = self._state.weights[name]
        parameter = weight.parameter.detach().to(weight.leaf.dtype)
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _run(self, state: list[torch.Tensor], inputs: list[torch.Tensor], extra: list[torch.Tensor]) -> list[torch.Tensor]:
        graph = self._lowered.train if self.training else self._lowered.evaluate
        flat = self._compute(graph, [*state, *inputs, *extra])
        size = len(self._results.positions)
        for i, value in enumerate(flat[size:]):
            self._update(i, value)
        return list(flat[:size])

    def _compute(self, program: fx.GraphModule, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Calls a program of this rank, the whole or a stage."""
        return recompute.run(program, self._mesh, arguments)

    @torch.no_grad()
    def _update(self, i: int, value: torch.Tensor) -> None:
        """Gives a buffer the new value that the program returned as number ``i``."""
        self._state.buffers[self._updates[i]].copy_(value)

    def _whole(self, state: list[torch.Tensor], inputs: list[torch.Tensor], extra: list[torch.Tensor]) -> list[torch.Tensor]:
        since = self._mesh.recorder.enter("forward")
        outputs = self._run(state, inputs, extra)
        self._mesh.recorder.leave(since)
        for output in outputs:
            if output.requires_grad:
                self._timed.watch(output)
                self._sync.watch(output)
        return outputs

    def _in_parts(
        self, joining: Parts, state: list[torch.Tensor], inputs: list[torch.Tensor], extra: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Forward and backward of one microbatch after another; the gradients wait for the loss's backward."""
        done: list[list[torch.Tensor]] = []
        trains = False
        self._sync.clear()
        for number in range(joining.count):
            self._mesh.streams.microbatch = number
            since = self._mesh.recorder.enter("forward")
            outputs = self._run(state, joining.select(inputs, number), extra)
            self._mesh.recorder.leave(since)
            loss = outputs[self._results.loss]
            trains = loss.requires_grad
            if trains:
                if number == joining.count - 1:
                    self._sync.begin()
                since = self._mesh.recorder.enter("backward")
                loss.backward()
                self._mesh.recorder.leave(since)
            done.append([output.detach() for output in outputs])
            del outputs, loss
        results = joining.join(done)
        del done
        if trains:
            gradients = self._sync.finish()
            self._gather.close()
            anchor = torch.zeros((), requires_grad=True)
            results[self._results.loss] = Release.apply(anchor, results[self._results.loss], self._sync, gradients)
        return results

    def _staged(self, stages: Stages, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The whole schedule; the gradients wait for the loss's backward."""
        backward = self._trains and torch.is_grad_enabled()
        counted = self._lowered.prologue is not None and stages.counts
        extra = self._counted(inputs) if counted else []
        state = [None if name in self._elsewhere else self._state.argument(name) for name in self._lowered.state]
        outputs, gradients = stages.run(self._compute, [*state, *inputs, *extra], self._update, self.training, backward)
        self._gather.close()
        loss = outputs[self._results.loss]
        if backward:
            loss = Release.apply(torch.zeros((), requires_grad=True), loss, self._sync, gradients)
        return [
            self._summed(loss, stages.loss_group) if i == self._results.loss else stages.present(output, i)
            for i, output in enumerate(outputs)
        ]

    def _select(self, inputs: list[torch.Tensor], part: int) -> list[torch.Tensor]:
        return inputs if self._parts is None else self._parts.select(inputs, part)

    def _presented(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        layouts = self._lowered.output_layouts
        return [
            self._summed(output, self._loss_group) if i == self._results.loss else as_dtensor(output, layout, self._mesh)
            for i, (output, layout) in enumerate(zip(outputs, layouts, strict=True))
        ]

    def _summed(self, share: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        loss = share if group is None else total(share, group)
        self._loss = loss.pending if isinstance(loss, PendingLoss) else None
        return loss

    def _settle(self) -> None:
        """After a step, also one that failed: nothing is under way, and gathered parameters are let go."""
        self._tensor_cores.close()
        if self._loss is not None:
            finish(self._loss)
            self._loss = None
        self._gather.close()

    def _refresh(self) -> None:
        for weight in self._weights:
            weight.refresh()

    def _reopen(self) -> None:
        """Before a backward."""
        self._tensor_cores.open()
        self._refresh()
        if not self._gather.is_open:
            self._gather.open()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; values may be whole tensors, the same on every rank, or DTensors. Always copies (the graph
        holds on to the memory), so ``assign`` has no effect. What other ranks of a pipeline hold is passed over."""
        own = self.state_dict()
        here = {name: value for name, value in state_dict.items() if name not in self._elsewhere}
        converted = {name: laid_like(own.get(name), value, self._mesh) for name, value in here.items()}
        return super().load_state_dict(converted, strict=strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Compiled:
        """Called by ``to``, ``half``, ``cuda`` and their like."""
        stays(self.parameters(), self._mesh.device, fn)
        return self
