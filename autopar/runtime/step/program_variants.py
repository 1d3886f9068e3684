"""Which program a call runs: it depends on ``train()`` and ``eval()`` of the model and its parts.

The program for training exists from the start. What ``eval()`` changes is asked for at the first
call in which a part does not train. Programs for a model with some parts in ``eval()`` are made at
the first call in these modes, and kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
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
    """The program in certain modes.

    Attributes:
        program: the whole program.
        stages: the same program, cut into stages.
        skipped_updates: the numbers of the updates that it does not make.
        number: of the modes; the same on all ranks.
        draws: whether the program draws random numbers.
    """

    program: fx.GraphModule
    stages: Sequence[StageProgram]
    skipped_updates: frozenset[int]
    number: int

    def __post_init__(self) -> None:
        self.draws = draws(self.program)


def draws(program: fx.GraphModule) -> bool:
    """Whether ``program`` draws random numbers."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    return any(graph_kernels.draws_random_numbers(operator_of(n.target), n.args) for n in nodes)


class ProgramVariants:
    """The variants of ``lowered`` for the modes of ``root`` and its modules. ``updates``: the names
    of the buffers that the program updates. ``evaluation()``: the programs with what ``eval()``
    changes, where ``lowered`` was made without that knowledge; copies of the program ask it, too.
    """

    def __init__(
        self,
        root: nn.Module,
        lowered: LoweredModel,
        updates: Sequence[str],
        evaluation: Callable[[], LoweredModel] | None = None,
    ) -> None:
        self._root, self._updates, self.evaluation = root, updates, evaluation
        self._knows_evaluation = evaluation is None
        self._last: tuple[tuple[bool, ...], ProgramVariant] | None = None
        self._training: ProgramVariant | None = None
        self._take(lowered)

    def _take(self, lowered: LoweredModel) -> None:
        """Finds the modules whose modes choose a program of ``lowered``."""
        self._lowered, self._evaluation_mode = lowered, lowered.evaluation_mode
        root, updates = self._root, self._updates
        always = self._evaluation_mode.updates  # buffers that a call in eval() updates, too
        self._owners = ["" if name in always else name.rpartition(".")[0] for name in updates]
        self._always = frozenset(i for i, name in enumerate(updates) if name in always)
        known = dict(root.named_modules(remove_duplicate=False))
        paths = {path: known.get(path, root) for path in (*lowered.switched_modules, *self._owners)}
        if not self._knows_evaluation or self._evaluation_mode.mismatch is not None:
            # Any module of the user's own class may be the one that reads self.training.
            paths |= {
                path: module for path, module in known.items() if not _is_torch_module(module)
            }
        self._modules = list({id(module): module for module in (root, *paths.values())}.values())
        number = {id(module): i for i, module in enumerate(self._modules)}
        self._places = {path: number[id(module)] for path, module in paths.items()}
        self._variants: dict[tuple[bool, ...], ProgramVariant] = {}

    def current(self) -> ProgramVariant:
        """The program for the modes that the modules are in.

        Raises :class:`RunError` for modes in which the model may compute something else than the
        program, and :class:`CaptureError` for a model that cannot be traced in ``eval()``.
        """
        modes = tuple([module.training for module in self._modules])
        if self._last is None or self._last[0] != modes:
            if not (self._knows_evaluation or all(modes)):
                self._learn_evaluation()
                return self.current()
            if modes not in self._variants:
                self._check(modes)
                self._variants[modes] = self._make(modes)
            self._last = modes, self._variants[modes]
        return self._last[1]

    def _learn_evaluation(self) -> None:
        assert self.evaluation is not None
        lowered = self.evaluation()
        self._knows_evaluation = True
        self._take(lowered)

    def _make(self, modes: tuple[bool, ...]) -> ProgramVariant:
        lowered = self._lowered
        if all(modes):
            if self._training is None:
                stages = [stage.train for stage in lowered.stages]
                self._training = ProgramVariant(lowered.train, stages, frozenset(), 0)
            return self._training
        number = sum(1 << (i % 30) for i, on in enumerate(modes) if not on)
        number += self._digest() << 40
        if not any(modes):
            stages = [stage.evaluate for stage in lowered.stages]
            skipped = frozenset(range(len(self._owners))) - self._always
            return ProgramVariant(lowered.evaluate, stages, skipped, number)
        off = {path for path, place in self._places.items() if not modes[place]}
        program, partly = lowered.partly_evaluating(off)
        skipped = frozenset(i for i, owner in enumerate(self._owners) if owner in off)
        return ProgramVariant(program, partly, skipped - self._always, number)

    def _digest(self) -> int:
        """A number of 16 bits for what ``eval()`` changes. It lets ranks whose traces differ notice
        it.
        """
        mode = self._evaluation_mode
        found = sorted(mode.unswitched), sorted(mode.updates), mode.mismatch
        return zlib.crc32(repr(found).encode()) & 0xFFFF

    def _check(self, modes: tuple[bool, ...]) -> None:
        mismatch = self._evaluation_mode.mismatch
        if mismatch is None:
            return
        for path, place in {"": 0, **self._places}.items():
            if not modes[place] and not _is_torch_module(self._modules[place]):
                raise RunError(
                    f"with {path or 'the model'} in eval() this model may compute something else "
                    "than in training, beyond dropout and BatchNorm: it reads self.training "
                    f"{mismatch}, and only its training was compiled: leave it in train(), freeze "
                    "only modules of torch.nn such as BatchNorm and Dropout, or evaluate the plain "
                    "model, loaded from state_dict()"
                )


def _is_torch_module(module: nn.Module) -> bool:
    """Whether the module is of a class of torch's, so that the effect of ``eval()`` on it is known.
    Modules of the user's classes are ``nn.Module`` itself here, without the user's code.
    """
    return type(module).__module__.startswith("torch.nn.modules.") and type(module) is not nn.Module
