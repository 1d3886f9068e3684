"""Which program a call runs: what ``train()`` and ``eval()`` of the model and of its parts have
come to.

The program that trains and the one that evaluates are made beforehand; others, of models of which a
part is frozen in ``eval()``, when they are called for, and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx, nn

from autopar.errors import RunError
from autopar.runtime.kernels import graph_kernels
from autopar.runtime.pipeline.recompute import operator_of

if TYPE_CHECKING:
    from autopar.passes.lowering.lower import LoweredModel
    from autopar.passes.lowering.split_stages import StageProgram


@dataclass(eq=False)
class ProgramVariant:
    """A program in certain modes: whole, and by stages; ``kept`` are the numbers of the updates
    that it does not make.
    """

    program: fx.GraphModule
    stages: Sequence[StageProgram]
    kept: frozenset[int]
    number: int  # of its modes, the same on all ranks

    def __post_init__(self) -> None:
        nodes = [n for n in self.program.graph.nodes if n.op == "call_function"]
        self.draws = any(graph_kernels.draws(operator_of(n.target), n.args) for n in nodes)


class ProgramVariants:
    """The variants of ``lowered`` for the tree of modules under ``root``; ``updates`` are the
    buffers that it updates, by name.
    """

    def __init__(self, root: nn.Module, lowered: LoweredModel, updates: Sequence[str]) -> None:
        self._lowered, self._evaluation_mode = lowered, lowered.evaluation_mode
        self._owners = [
            "" if name in self._evaluation_mode.updates else name.rpartition(".")[0]
            for name in updates
        ]
        self._always = frozenset(
            i for i, name in enumerate(updates) if name in self._evaluation_mode.updates
        )
        known = dict(root.named_modules(remove_duplicate=False))
        paths = {path: known.get(path, root) for path in (*lowered.switched_modules, *self._owners)}
        if (
            self._evaluation_mode.mismatch is not None
        ):  # any of the model's own modules may be what reads self.training
            paths |= {path: module for path, module in known.items() if not _of_torch(module)}
        self._number = {id(root): 0}
        self._modules = [root]
        for module in paths.values():
            if id(module) not in self._number:
                self._number[id(module)] = len(self._modules)
                self._modules.append(module)
        self._places = {path: self._number[id(module)] for path, module in paths.items()}
        self._variants: dict[tuple[bool, ...], ProgramVariant] = {}
        self._last: tuple[tuple[bool, ...], ProgramVariant] | None = None

    def now(self) -> ProgramVariant:
        """The program for the modes that the modules are in.

        Raises :class:`RunError` for modes in which the model computes something else than the
        program.
        """
        modes = tuple([module.training for module in self._modules])
        if self._last is None or self._last[0] != modes:
            if modes not in self._variants:
                self._check(modes)
                self._variants[modes] = self._make(modes)
            self._last = modes, self._variants[modes]
        return self._last[1]

    def _make(self, modes: tuple[bool, ...]) -> ProgramVariant:
        lowered, number = self._lowered, sum(1 << (i % 30) for i, on in enumerate(modes) if not on)
        if all(modes):
            return ProgramVariant(
                lowered.train, [stage.train for stage in lowered.stages], frozenset(), number
            )
        if not any(modes):
            every = frozenset(range(len(self._owners)))
            return ProgramVariant(
                lowered.evaluate,
                [stage.evaluate for stage in lowered.stages],
                every - self._always,
                number,
            )
        off = {path for path, place in self._places.items() if not modes[place]}
        program, stages = lowered.partly_evaluating(off)
        kept = {i for i, owner in enumerate(self._owners) if not modes[self._places[owner]]}
        return ProgramVariant(program, stages, frozenset(kept) - self._always, number)

    def _check(self, modes: tuple[bool, ...]) -> None:
        mismatch = self._evaluation_mode.mismatch
        if mismatch is None:
            return
        for path, place in {"": 0, **self._places}.items():
            if not modes[place] and not _of_torch(self._modules[place]):
                raise RunError(
                    f"with {path or 'the model'} in eval() this model may compute something else "
                    "than in training, beyond dropout and "
                    f"BatchNorm: it reads self.training {mismatch}, and only its training was "
                    "compiled: leave it in train(), freeze only "
                    "modules of torch.nn such as BatchNorm and Dropout, or evaluate the plain "
                    "model, loaded from state_dict()"
                )


def _of_torch(module: nn.Module) -> bool:
    """Whether it is known what the module does in ``eval()``: the user's own have no code here, and
    torch's base class.
    """
    return type(module).__module__.startswith("torch.nn.modules.") and type(module) is not nn.Module
