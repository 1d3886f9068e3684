"""The module that a user trains: a lowered program and its parameters, called and saved like the
model that it was compiled from.
"""

from __future__ import annotations

import copy
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import RunError
from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.communication.desync import DesyncDetector
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.replicas import check_replicas
from autopar.runtime.dtensors.sharding import redistributed_like
from autopar.runtime.kernels import graph_kernels
from autopar.runtime.measure.peak_memory import step_peak_bytes
from autopar.runtime.measure.step_recorder import gather_rank_times
from autopar.runtime.module.module_tree import (
    build_tree,
    check_attribute,
    copy_tree,
    forward_attributes,
    seal,
)
from autopar.runtime.module.signature import OutputStructure, Signature
from autopar.runtime.optimizer.checkpoints import install_state_dict_checks
from autopar.runtime.optimizer.gradient_clipping import install_clipping
from autopar.runtime.optimizer.step_hooks import install_step_hooks
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.model_state import (
    ModelState,
    check_dtype_and_device,
    with_meta_state,
)
from autopar.runtime.pipeline.recompute import operator_of
from autopar.runtime.step.program_variants import ProgramVariant, ProgramVariants
from autopar.runtime.step.step_runner import StepRunner

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.passes.lowering.lower import LoweredModel
    from autopar.plan import Plan
    from autopar.runtime.measure.comparison import Comparison

_RANDOM = "random_state"


class Compiled(nn.Module):
    """A model as a distributed program; called and trained like the model itself.

    The loss it returns is that of the whole batch on every rank; other outputs are DTensors.
    Parameters are DTensors that hold this rank's part, under the model's names; on a single device
    they are plain tensors. ``backward`` of the loss synchronises gradients. With several
    microbatches forward and backward run inside the call, unless gradients are off; ``backward`` of
    the loss then releases the gradients, and one through another output raises. So it is under a
    pipeline, where each rank has the parameters of its own stages.

    It has the model's parts as they were compiled: what cannot have an effect (another value of an
    attribute, a hook on a part, a new layer) raises :class:`RunError`.

    Attributes: ``plan``; ``mesh``, that of the rank's stages; ``config``, the model's, if it has
        one.
    """

    _uncompiled: ClassVar[Callable[..., Any]]  # what a call does, out of torch.compile's sight

    def __init__(
        self,
        captured: CapturedModel,
        plan: Plan,
        lowered: LoweredModel,
        mesh: Mesh,
        *,
        model: nn.Module | None = None,
        like: Compiled | None = None,
    ) -> None:
        super().__init__()
        self._captured = with_meta_state(captured)
        self._plan, self._mesh, self._lowered = plan, mesh, lowered
        self._signature = Signature(
            captured,
            mesh.device,
            plan.microbatches,
            [t.dim if t.is_shard else None for t in lowered.input_time_types],
        )
        self._output_structure = OutputStructure(captured)
        holders = Holders(captured, lowered, mesh.pipeline) if lowered.stages else None
        keep = holders.held_by(mesh.pipeline_rank) if holders else None
        whole = (
            plan.microbatches == 1 and holders is None
        )  # then ranks meet in the backward that the user calls
        self._state: ModelState = ModelState(
            captured,
            lowered.parameters,
            mesh,
            share_leaf=whole,
            keep=keep,
            like=None if like is None else like._state,
        )
        self._place(captured, model)
        if model is not None and hasattr(model, "config"):
            self.config = model.config
        self._modes = ProgramVariants(self, lowered, captured.updates)
        self._draws = any(
            graph_kernels.draws(operator_of(n.target), n.args)
            for n in lowered.train.graph.nodes
            if n.op == "call_function"
        )
        self._desync = None
        if mesh.program_group is not None and dist.get_backend() != "fake":
            identity = zlib.crc32(repr([list(captured.state), self._signature.names]).encode())
            self._desync = DesyncDetector(
                mesh, identity, self._signature.names, always=self._draws, meets=whole
            )
        on_backward, on_step = (
            (None, None) if self._desync is None else (self._desync.backward, self._desync.step)
        )
        self._runner = StepRunner(
            captured,
            plan,
            lowered,
            mesh,
            self._state,
            holders,
            loss=self._output_structure.loss,
            names=self._signature.names,
            on_backward=on_backward,
        )
        if holders:
            install_clipping(self, self._state.weights.values(), mesh, holders)
            install_state_dict_checks(self)
        install_step_hooks(
            self,
            dict(self.named_parameters()),
            [weight.leaf for weight in self._runner.weights],
            mesh,
            on_step,
            replaced=model.parameters() if model is not None and like is None else (),
        )
        if model is not None:
            seal(self, "", forward_attributes(model) - self.__dict__.keys())
        Compiled._uncompiled = torch.compiler.disable(
            Compiled._call
        )  # here, as it loads what only compiling needs

    def _place(self, captured: CapturedModel, model: nn.Module | None) -> None:
        if model is not None:
            copy_tree(model, self, lambda name, _: self._state.user_tensor(name, captured.aliases))
            return
        constants = {i.target for i in captured.inputs if i.kind == "constant"}
        names = [name for name in [*captured.state, *captured.aliases] if name not in constants]
        tensors = {name: self._state.user_tensor(name, captured.aliases) for name in names}
        build_tree(
            self, {name: tensor for name, tensor in tensors.items() if tensor is not None}, names
        )

    @property
    def plan(self) -> Plan:
        """What was decided."""
        return self._plan

    @property
    def mesh(self) -> Mesh:
        """Where it runs."""
        return self._mesh

    @property
    def random_state(self) -> torch.Tensor:
        """What dropout will draw depends on: three integers, the seed and the numbers of calls that
        drew, in training and otherwise.

        To go on with fresh numbers after a restart, save it and set it before the first step, on
        all ranks; ``torch.save`` of ``state_dict()`` and ``load_state_dict`` do by themselves. It
        is the same on all ranks. Seeding torch's generator starts anew.
        """
        return self._mesh.random_streams.state

    @random_state.setter
    def random_state(self, value: torch.Tensor) -> None:
        self._mesh.random_streams.state = value

    def check_replicas(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compares over all ranks what should be equal: the replicas of parameters and gradients,
        buffers, the random state, modes, and given an ``optimizer`` its state. All ranks must call
        it; it takes as long as reading all of that.

        Raises :class:`RunError`, on every rank, that names what is not equal, with the ranks and
        the largest difference.
        """
        modes = {
            f"training of {name or 'the program'}": module.training
            for name, module in self.named_modules()
        }
        more = modes if self._plan.pipeline == 1 else {}
        more = {
            **more,
            "random_state": self.random_state,
            "the record of calls": self._desync.state if self._desync is not None else (),
        }
        check_replicas(dict(self.named_parameters()), dict(self.named_buffers()), more, optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """An independent copy on the same ranks: parameters and buffers of its own, the programs
        and groups shared. It draws random numbers of its own."""
        twin = Compiled(
            self._captured, self._plan, self._lowered, self._mesh.twin(), model=self, like=self
        )
        memo[id(self)] = twin
        for mine, other in zip(self.parameters(), twin.parameters(), strict=True):
            other.requires_grad_(mine.requires_grad)
            memo[id(mine)] = other
        for name, value in self.__dict__.items():
            if "_hooks" in name:
                twin.__dict__[name] = copy.copy(value)
            elif name not in twin.__dict__:  # what the user noted on it
                twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RunError(
            "a compiled program cannot be pickled: save its state_dict(), or make a copy in this "
            "process with copy.deepcopy"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(self, name)
        super().__setattr__(name, value)

    def compare(self, sample: Any = None) -> Comparison:
        """What the steps so far took beside what the plan predicted, by kind, stage and device; the
        same on every rank. All ranks must call it, after six or more calls of an ordinary training
        loop. The step that is under way does not count.

        On a GPU its memory is the most that torch's allocator held in a step. A CPU keeps no such
        count: given a ``sample`` (a batch, in the form of the sample input), one forward and
        backward more runs with every tensor watched, and all is as before.

        Raises :class:`RunError` on every rank where one has seen too few steps.
        """
        from autopar.runtime.measure.comparison import compare

        peak = None
        if sample is not None and self._mesh.device.type == "cpu":
            peak = run_on_all_ranks(
                "a step for its memory",
                lambda: step_peak_bytes(self, self._mesh, self._output_structure.loss_of, sample),
            )
        own = range(self._mesh.pipeline_rank, len(self._plan.stages), self._mesh.pipeline)
        return compare(
            self._plan,
            gather_rank_times(self._mesh.recorder.times(self._mesh.pipeline_rank, own, peak)),
        )

    def print_program(self) -> None:
        """Prints the program of one microbatch on this rank, as Python."""
        variant = self._modes.now()
        stages = self._runner.stages
        for program in stages.programs(variant.stages) if stages else [variant.program]:
            print(program.print_readable(print_output=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a global batch of the sample's shapes, given whole to every rank.

        Raises :class:`RunError` for arguments unlike the sample's, for ranks that have drifted
        apart, and in ``eval()`` for a model that then computes something else.
        """
        if (
            torch.compiler.is_compiling()
        ):  # torch.compile takes the code around the program, which has its own graphs
            return Compiled._uncompiled(self, *args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._desync is None else self._desync.enter_call():
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._runner.check()
        variant = self._modes.now()
        inputs = self._signature.bind(args, kwargs)
        self._runner.check_inputs(inputs)
        self._state.check_has_values()
        self._begin(inputs, variant)
        self._mesh.recorder.begin(self.training and torch.is_grad_enabled())
        return self._output_structure.build(self._runner(inputs, variant))

    def _begin(self, inputs: list[torch.Tensor], variant: ProgramVariant) -> None:
        """A call: do all ranks make the same one, and which random numbers does it draw?"""
        random_streams = self._mesh.random_streams
        seed = own = random_streams.propose_seed(self.training) if variant.draws else None
        if self._desync is not None:
            mode = 2 * variant.number + torch.is_grad_enabled()
            seed = self._desync.call(
                inputs,
                mode,
                self._runner.trains(),
                random_streams.seed or 0,
                random_streams.trained,
                own,
            )
        if own is not None and seed is not None:
            random_streams.restart(own, seed)
        if variant.draws:
            random_streams.next_step(self.training)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As ``nn.Module.load_state_dict``; values may be whole tensors, the same on every rank, or
        DTensors. Always copies (the graph holds on to the memory), so ``assign`` has no effect.
        What other ranks of a pipeline hold is passed over."""
        own = self.state_dict()
        here = {
            name: value for name, value in state_dict.items() if name not in self._runner.absent
        }
        converted = OrderedDict(
            (name, redistributed_like(own.get(name), value, self._mesh))
            for name, value in here.items()
        )
        converted._metadata = getattr(state_dict, "_metadata", {})  # type: ignore[attr-defined]
        return super().load_state_dict(converted, strict=strict)

    # The random state goes where torch keeps versions: a key of its own would be one that the plain
    # model does not know.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._draws:
            destination._metadata[prefix[:-1]][_RANDOM] = self.random_state.tolist()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self._draws and _RANDOM in local_metadata:
            self.random_state = torch.tensor(local_metadata[_RANDOM])

    def _apply(self, fn: Any, recurse: bool = True) -> Compiled:
        """Called by ``to``, ``half``, ``cuda`` and their like."""
        check_dtype_and_device(self.parameters(), self._mesh.device, fn)
        return self
