"""The arguments and outputs of a compiled model: from the user's arguments to the graph's inputs,
and from the graph's outputs to the model's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.errors import RunError
from autopar.ir.layout import Type
from autopar.runtime.communication.rank_device import same_device
from autopar.runtime.data.rank_batch import RankBatch
from autopar.runtime.module.input_kinds import check_kind

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel

_ADVICE = (
    "the program is compiled for the sample's shapes; drop the last, smaller batch "
    "(DataLoader(drop_last=True)), pad it, or compile again with a sample of this shape"
)


class Signature:
    """The arguments that a captured model takes.

    Arguments: ``device``, where inputs must be; ``microbatches``, the number of microbatches in a
    batch (the graph takes one microbatch); ``times``, the type of each input along time; ``batch``,
    which part of the batch this rank passes.
    """

    def __init__(
        self,
        captured: CapturedModel,
        device: torch.device,
        microbatches: int,
        times: Sequence[Type],
        batch: RankBatch,
    ) -> None:
        self._device, self._batch = device, batch
        self._constants = captured.constant_inputs
        size = captured.in_spec.num_leaves
        args, kwargs = tree_unflatten(list(range(size)), captured.in_spec)
        self._args: list[Any] = list(args)  # trees of positions among the flat arguments
        self._kwargs: dict[str, Any] = dict(kwargs)
        inputs = [i for i in captured.inputs if i.kind == "input"]
        tensors = [position for position in range(size) if position not in self._constants]
        samples = {
            node.name: node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"
        }
        # By flat position: the argument's name, its shape on this rank, and its dtype.
        self._samples: dict[int, tuple[str, tuple[int, ...], torch.dtype]] = {}
        for place, (position, i, t) in enumerate(zip(tensors, inputs, times, strict=True)):
            shape = [
                n * microbatches if d == t.dim else n for d, n in enumerate(samples[i.name].shape)
            ]
            own = batch.own_shape(place, shape)
            self._samples[position] = (i.target, own, samples[i.name].dtype)
        self._size = size

    @property
    def names(self) -> list[str]:
        """The user's name of each of the graph's inputs."""
        return [name for name, *_ in self._samples.values()]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The graph's inputs, in order. Raises :class:`RunError` for an argument that is missing,
        unknown, or unlike the sample's.
        """
        if len(args) > len(self._args):
            raise RunError(
                f"got {len(args)} positional arguments, the sample had {len(self._args)}"
            )
        flat: list[Any] = [None] * self._size
        filled: set[int] = set()
        for place, (value, tree) in enumerate(zip(args, self._args, strict=False)):
            self._fill(flat, filled, value, tree, f"args[{place}]")
        for name, value in kwargs.items():
            if name not in self._kwargs:
                raise RunError(
                    f"got an argument {name!r}, the sample had {self._names()}: leave it out, or "
                    "compile with it in the sample"
                )
            self._fill(flat, filled, value, self._kwargs[name], name)
        for position, value in self._constants.items():
            if position not in filled:
                flat[position] = value
        missing = [name for position, (name, *_) in self._samples.items() if position not in filled]
        if missing:
            raise RunError(f"missing {', '.join(missing)}: the sample had {self._names()}")
        for position, value in self._constants.items():
            if not _same(flat[position], value):
                raise RunError(
                    f"an argument is {_short(flat[position])}, the sample had {_short(value)}: "
                    "compile again to change it"
                )
        return [self._check(flat[position], *sample) for position, sample in self._samples.items()]

    def _fill(self, flat: list[Any], filled: set[int], value: Any, tree: Any, name: str) -> None:
        if isinstance(tree, int):  # the argument is one leaf
            flat[tree] = value
            filled.add(tree)
            return
        positions, expected = tree_flatten(tree)
        values, found = tree_flatten(value)
        if found != expected:
            raise RunError(f"{name} is built as {found}, in the sample it was {expected}")
        for position, leaf in zip(positions, values, strict=True):
            flat[position] = leaf
            filled.add(position)

    def _names(self) -> str:
        return (
            ", ".join([f"args[{place}]" for place in range(len(self._args))] + list(self._kwargs))
            or "none"
        )

    def _check(
        self, value: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise RunError(f"{name} is {_short(value)}, the sample had a tensor of shape {shape}")
        check_kind(value, name)
        if value.shape != shape:
            if value.ndim != len(shape):
                raise RunError(
                    f"{name} has {value.ndim} dims {tuple(value.shape)}, the sample had "
                    f"{len(shape)}: {shape}"
                )
            dim = next(d for d in range(value.ndim) if value.shape[d] != shape[d])
            raise RunError(
                f"{name} has size {value.shape[dim]} in dim {dim}, expected {shape[dim]} (shape "
                f"{tuple(value.shape)}, {self._batch.whose_shape} {shape}): {_ADVICE}; "
                f"{self._batch.shape_advice()}"
            )
        if value.dtype != dtype:
            raise RunError(
                f"{name} is {value.dtype}, the sample had {dtype}: convert it, or compile again"
            )
        if not same_device(value.device, self._device):
            raise RunError(
                f"{name} is on {value.device}, this rank's program runs on {self._device}: pass "
                f"{name}.to({str(self._device)!r})"
            )
        return value


def _same(value: Any, constant: Any) -> bool:
    return value is constant or (
        not isinstance(value, torch.Tensor)
        and type(value) is type(constant)
        and bool(value == constant)
    )


def _short(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)[:80]
    )


class OutputStructure:
    """The structure of a captured model's output: tensors of the graph, and constants.

    Attributes: ``positions``, those of the tensors among the flat output; ``loss``, the place of
    the loss among the tensors.
    """

    def __init__(self, captured: CapturedModel) -> None:
        self._spec = captured.out_spec
        (outputs,) = next(node for node in captured.graph.nodes if node.op == "output").args
        self._leaves = list(outputs[: captured.out_spec.num_leaves])
        self.positions = [
            i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.fx.Node)
        ]
        self.loss = self.positions.index(captured.loss)

    def loss_of(self, output: Any) -> torch.Tensor:
        """The loss in an output that :meth:`build` made."""
        return tree_flatten(output)[0][self.positions[self.loss]]

    def build(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The model's output, given its tensors in order."""
        leaves = list(self._leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self._spec)
