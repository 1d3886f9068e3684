"""The compiled module: a lowered program, called, trained and saved like the model itself."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from autopar.errors import RunError
from autopar.runtime.agreement.replicas import check_replicas
from autopar.runtime.checkpoint.methods import Checkpoints
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.compilation.backends import Backend, make_backend
from autopar.runtime.data.data_loading import DataLoading
from autopar.runtime.data.rank_batch import RankBatch
from autopar.runtime.dtensors.sharding import redistributed_like
from autopar.runtime.module.call_agreement import agree_on_call, make_detector
from autopar.runtime.module.call_guard import CallGuard
from autopar.runtime.module.load_hooks import check_own_loading, converting, places
from autopar.runtime.module.measurement import Measurement
from autopar.runtime.module.module_tree import (
    build_tree,
    check_attribute,
    code_error,
    copy_tree,
    forward_attributes,
    seal,
)
from autopar.runtime.module.signature import OutputStructure, Signature
from autopar.runtime.module.wrappers import Unwrapped
from autopar.runtime.optimizer.checkpoints import install_state_dict_checks
from autopar.runtime.optimizer.gradient_clipping import install_clipping
from autopar.runtime.optimizer.step_hooks import install_step_hooks
from autopar.runtime.parameters.gradient_handlers import GradientHandling
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.model_state import (
    ModelState,
    check_dtype_and_device,
    with_meta_state,
)
from autopar.runtime.step.program_variants import ProgramVariants, draws
from autopar.runtime.step.step_runner import StepRunner
from autopar.runtime.values.methods import ModelValues

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.passes.lowering.lower import LoweredModel
    from autopar.plan import Plan


class Compiled(DataLoading, Checkpoints, Measurement, ModelValues, GradientHandling, Unwrapped):
    """A model as a distributed program, called and trained like the model itself.

    The loss in its output, like any other scalar, is that of the whole batch, on every rank; other
    outputs are DTensors.
    Parameters are DTensors that hold this rank's shard, under the model's names; on a single device
    they are plain tensors. ``loss.backward()`` synchronises gradients.

    With several microbatches, forward and backward run inside the call, unless gradients are off.
    Then ``loss.backward()`` only releases the gradients, and a backward through another output
    raises. A pipeline does the same, and each rank has the parameters of its own stages.

    The program was made of the model's parts as they were when it was compiled. A change that could
    have no effect (another value of an attribute, a hook on a part, a new layer) raises
    :class:`RunError`.

    Attributes: ``plan``; ``mesh``, that of the rank's stages; ``config``, the model's, if it has
        one; ``model_class``, the model's.
    """

    _uncompiled: ClassVar[Callable[..., Any]]  # a call that torch.compile does not trace

    def __init__(
        self,
        captured: CapturedModel,
        plan: Plan,
        lowered: LoweredModel,
        mesh: Mesh,
        *,
        model: nn.Module | None = None,
        like: Compiled | None = None,
        guard: CallGuard | None = None,
        evaluation: Callable[[], LoweredModel] | None = None,
        progress: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__()
        self._captured, self._cuda_graphs = with_meta_state(captured), cuda_graphs
        self._plan, self._mesh, self._lowered, self._was_called = plan, mesh, lowered, False
        self._rank_batch = batch = RankBatch(captured, plan, lowered.batch, mesh)
        times = lowered.input_time_types
        self._signature = Signature(captured, mesh.device, plan.microbatches, times, batch)
        self._guard, self._output_structure = guard or CallGuard(), OutputStructure(captured)
        holders = Holders(captured, lowered, mesh.pipeline) if lowered.stages else None
        keep = holders.held_by(mesh.pipeline_rank) if holders else None
        values = None if like is None else like._state
        # Ranks meet in the backward that the user calls: no other runs inside the call.
        meets = plan.microbatches == 1 and holders is None
        self._state: ModelState = ModelState(
            captured, lowered.parameters, mesh, share_leaf=meets, keep=keep, like=values
        )
        self._fill_tree(captured, model)
        self._variants = ProgramVariants(self, lowered, captured.updates, evaluation)
        self._draws, names = draws(lowered.train), self._signature.names
        self._desync = make_detector(mesh, [*captured.state], names, batch, self._draws, meets)
        self._backend = self._make_backend(progress)
        self._runner = self._make_runner(captured, holders)
        self._install_hooks(holders, model if like is None else None)
        self._remember(like._source if like is not None else model)
        if model is not None:
            seal(self, "", forward_attributes(model) - self.__dict__.keys())
        Compiled._uncompiled = torch.compiler.disable(Compiled._call)  # imports torch's compiler

    def _fill_tree(self, captured: CapturedModel, model: nn.Module | None) -> None:
        """Gives this module the parts, parameters and buffers of the model, under its names."""
        if model is None:
            build_tree(self, captured, self._state.user_tensor)
            return
        copy_tree(model, self, lambda name, _: self._state.user_tensor(name, captured.aliases))
        for name in ("config", "loss_type"):  # what a model of Hugging Face says of itself
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        self.model_class = getattr(model, "model_class", type(model))

    def _make_backend(self, progress: bool) -> Backend:
        name = self._plan.backend_on(self._mesh.device.type)
        lasting = self._state.lasting(self._lowered.state) if self._cuda_graphs else None
        return make_backend(name, self._mesh, progress, lasting, self._state.updated)

    def _make_runner(self, captured: CapturedModel, holders: Holders | None) -> StepRunner:
        return StepRunner(
            captured,
            self._plan,
            self._lowered,
            self._mesh,
            self._state,
            holders,
            loss=self._output_structure.loss,
            names=self._signature.names,
            on_backward=None if self._desync is None else self._desync.count_backward,
            backend=self._backend,
        )

    def _install_hooks(self, holders: Holders | None, model: nn.Module | None) -> None:
        """Hooks on clipping, checkpoints and optimizers; ``model`` is the one that was compiled."""
        if holders:
            install_clipping(self, self._state.weights.values(), self._mesh, holders)
            install_state_dict_checks(self)
        on_host = {n for n, p in self._plan.parameters.items() if p.offloaded}
        install_step_hooks(
            self,
            dict(self.named_parameters()),
            [weight.leaf for weight in self._runner.weights],
            self._mesh,
            None if self._desync is None else self._desync.count_step,
            replaced=model,
            on_host=[w.parameter for n, w in self._state.weights.items() if n in on_host],
        )

    @property
    def plan(self) -> Plan:
        """The plan of the program."""
        return self._plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks that run it."""
        return self._mesh

    @property
    def loss_scale(self) -> float:
        """The gradient of the loss with which a backward inside a call begins, in microbatches and
        under a pipeline. What it multiplies is divided again in ``loss.backward()``.
        :class:`autopar.LossScaler` sets it.
        """
        return self._runner.loss_scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._runner.loss_scale.value = value

    def check_replicas(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compares the replicas on all ranks: of parameters, gradients, buffers, the random state,
        modes, and of the state of ``optimizer`` if it is given. All ranks must call it. It takes
        the time of reading all these tensors.

        Raises :class:`RunError`, on every rank, with the names of unequal replicas, their ranks and
        the largest difference.
        """
        more: dict[str, Any] = {}
        if self._plan.pipeline == 1:
            for name, module in self.named_modules():
                more[f"training of {name or 'the program'}"] = module.training
        more["random_state"] = self.random_state
        more["the record of calls"] = self._desync.counts if self._desync is not None else ()
        check_replicas(dict(self.named_parameters()), dict(self.named_buffers()), more, optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """An independent copy on the same ranks. It shares programs and process groups, but no
        parameters, buffers and random state.
        """
        mesh, evaluation = self._mesh.copy_for_program(), self._variants.evaluation
        given = self._captured, self._plan, self._lowered, mesh
        own = dict(guard=self._guard.copy(), cuda_graphs=self._cuda_graphs)
        twin = Compiled(*given, model=self, like=self, evaluation=evaluation, **own)  # type: ignore[arg-type]
        memo[id(self)] = twin
        self._runner.gradient_handlers.copy_to(twin._runner.gradient_handlers)
        for mine, other in zip(self.parameters(), twin.parameters(), strict=True):
            other.requires_grad_(mine.requires_grad)
            memo[id(mine)] = other
        for name, value in self.__dict__.items():
            if "_hooks" in name:
                twin.__dict__[name] = copy.copy(value)
            elif name not in twin.__dict__:  # an attribute that the user set
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

    def print_program(self) -> None:
        """Prints the program of one microbatch on this rank, as Python."""
        variant = self._variants.current()
        stages = self._runner.stages
        for program in stages.programs(variant.stages) if stages else [variant.program]:
            print(program.print_readable(print_output=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a global batch of the sample's shapes. Every rank passes the whole
        batch, or with ``batch="local"`` the samples of its replica.

        Raises :class:`RunError` for arguments unlike the sample's, for ranks that have drifted
        apart, and in ``eval()`` for a model that then computes something else than in training.
        """
        if torch.compiler.is_compiling():  # the program is a graph already
            return Compiled._uncompiled(self, *args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self._was_called and self._mesh.device.type == "cuda":
            gc.collect()  # the parameters of the user's model, which circles of the trace hold
        self._was_called = True
        with self._guard, nullcontext() if self._desync is None else self._desync.enter_call():
            self._guard.check()
            self._runner.check_stages()
            variant, inputs = self._variants.current(), self._signature.bind(args, kwargs)
            self._runner.check_inputs(inputs)
            self._state.check_has_values()
            streams, runner = self._mesh.random_streams, self._runner
            agree_on_call(self._desync, streams, inputs, variant, self.training, runner)
            self._mesh.recorder.begin(self.training and torch.is_grad_enabled())
            return self._output_structure.build(runner(self._rank_batch.parts(inputs), variant))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As ``nn.Module.load_state_dict``. Values may be DTensors, or whole tensors that are the
        same on every rank. Always copies, because the graph refers to the parameters' memory:
        ``assign`` has no effect. Skips tensors that only other ranks of a pipeline hold. Hooks on
        ``load_state_dict`` of the model's modules run; :class:`RunError` where a module has a
        ``_load_from_state_dict()`` of its own and a name or a shape is not that of the model.
        """
        own, remote = self.state_dict(), self._runner.remote_state
        check_own_loading(self, state_dict, remote, strict)
        elsewhere = set(remote) - places(self)
        given = OrderedDict((n, v) for n, v in state_dict.items() if n not in elsewhere)
        given._metadata = getattr(state_dict, "_metadata", {})  # type: ignore[attr-defined]

        def convert(name: str, value: Any) -> Any:
            return None if name in remote else redistributed_like(own.get(name), value, self._mesh)

        with converting(self, convert):
            return super().load_state_dict(given, strict=strict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model_class = self.__dict__.get("model_class")
            if model_class is not None and hasattr(model_class, name):
                raise code_error(model_class, name) from None
            raise

    def _apply(self, fn: Any, recurse: bool = True) -> Compiled:
        """``to``, ``half``, ``cuda`` and others call it."""
        check_dtype_and_device(self.parameters(), self._mesh.device, fn)
        return self
