"""Compares a model with its captured graph on a few samples, in a small part of a step's time.

``passes/microbatch`` derives the graph of a microbatch from the graph of the whole batch by types.
Here the whole batch is a few samples repeated ``count`` times, so every microbatch holds the same
few samples. The model on these samples must then compute the results of one microbatch. A loss that
is a mean over the batch is ``count`` times the microbatch's share; a loss that is a sum is the
share itself.

Where model and graph agree, :func:`autopar.compile` is satisfied. Where they differ, the whole
batch decides, because a model may treat batches of different sizes differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.module_state import model_restored
from autopar.capture.sample_call import sample_arguments
from autopar.errors import PlanError
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.ir.layout import P, Type
from autopar.passes.microbatch.derive_microbatch import derive_microbatch, max_chunks
from autopar.rules.analysis import Analysis
from autopar.verification.differences import TOLERANCE, differences, relative_error
from autopar.verification.one_step import (
    called_module,
    eager_step,
    graph_step,
    output_name,
    tensors_of,
)
from autopar.verification.whole_batch import SampleError, check_captured, not_comparable

MIN_SAMPLES = 2  # a single sample does not show that the model mixes samples
MIN_COUNT = 2  # microbatches: half of the batch costs about a step, all of it about two


@dataclass(frozen=True)
class FewSamples:
    """A few samples of a batch.

    Attributes:
        captured: the graph of one microbatch, which holds these samples.
        prologue: the graph of the values that are computed once for all microbatches, if any.
        count: the number of microbatches in the batch.
    """

    captured: CapturedModel
    prologue: fx.Graph | None
    count: int

    def agree(self, model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> bool:
        """Whether model and graph compute the same on the first few samples of ``sample``.

        The model stays as it is.
        """
        try:
            few = self._few(sample)
            called = called_module(model, sample, loss_fn)
            with model_restored(called), torch.enable_grad():
                expected = eager_step(self.captured, model, few, loss_fn)
            with model_restored(called), torch.enable_grad():
                given = [*tensors_of(self.captured, few), *self._hoisted(few)]
                found = graph_step(self.captured, given, partial(self._scaled, expected.outputs))
        except Exception:  # with another batch size the model may raise any exception
            return False
        return all(d.is_allowed for d in differences(found, expected))

    def _times(self, kind: str) -> list[Type]:
        """For each input of one kind: the type of the tensor along the microbatches."""
        placeholders = self.captured.graph.find_nodes(op="placeholder")
        return [
            n.meta["time"]
            for n, i in zip(placeholders, self.captured.inputs, strict=True)
            if i.kind == kind
        ]

    def _scaled(self, expected: Mapping[str, torch.Tensor], outputs: Sequence[Any]) -> list[Any]:
        """The outputs of one microbatch, with its share of a mean scaled to the mean."""
        nodes: Sequence[Any] = self.captured.graph.output_node().args[0]  # type: ignore[assignment]
        found = list(outputs)
        for i, node in enumerate(nodes[: len(found)]):
            if isinstance(node, fx.Node) and node.meta["time"] is P:
                mean, value = found[i] * self.count, expected[output_name(self.captured, i)]
                found[i] = (
                    mean
                    if relative_error(mean, value) <= TOLERANCE.get(value.dtype, 0.0)
                    else found[i]
                )
        return found

    def _few(self, sample: Any) -> Any:
        """The sample with each tensor that microbatches split cut to the first microbatch."""
        spec = self.captured.in_spec
        times = iter(self._times("input"))
        leaves = [
            leaf
            if i in self.captured.constant_inputs
            else first_microbatch(leaf, next(times), self.count)
            for i, leaf in enumerate(spec.flatten_up_to(sample_arguments(sample)))
        ]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return kwargs or (args if not isinstance(sample, torch.Tensor) else args[0])

    def _hoisted(self, few: Any) -> list[torch.Tensor]:
        """One microbatch's part of the values that the prologue computes from the repeated
        samples.
        """
        if self.prologue is None:
            return []
        inputs = zip(tensors_of(self.captured, few), self._times("input"), strict=True)
        whole = iter([repeated_microbatch(t, time, self.count) for t, time in inputs])
        given = (i for i in self.captured.inputs if i.kind != "hoisted")
        tensors = [
            next(whole) if i.kind == "input" else self.captured.state[i.target] for i in given
        ]
        with torch.no_grad():
            made = fx.Interpreter(fx.GraphModule(nn.Module(), self.prologue)).run(*tensors)
        return [
            first_microbatch(t, time, self.count)
            for t, time in zip(made, self._times("hoisted"), strict=True)
        ]


def few_samples(analysis: Analysis) -> FewSamples | None:
    """The fewest samples that can stand for the batch; None where only most of the batch can.

    ``analysis`` is the analysis of the graph of the whole batch.
    """
    size = analysis.batch.size
    try:
        most = max_chunks(analysis)
        counts = [n for n in range(MIN_COUNT, size // MIN_SAMPLES + 1) if most % n == 0]
        return FewSamples(*derive_microbatch(analysis, counts[-1]), counts[-1]) if counts else None
    except PlanError:
        return None


def compare(analysis: Analysis, model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> str:
    """Compares the model with its captured graph on a few samples.

    Where these do not agree, the whole batch is compared. Returns the reason why nothing was
    compared; empty where model and graph agree.

    Raises:
        CaptureError: model and graph differ; see :func:`check_captured`.
    """
    whole, few = analysis.captured, few_samples(analysis)
    if (
        few is not None
        and not not_comparable(few.captured, model, sample)
        and few.agree(model, sample, loss_fn)
    ):
        return ""
    if problem := not_comparable(whole, model, sample):
        return problem
    try:
        check_captured(whole, model, sample, loss_fn)
    except SampleError as e:
        return str(e)
    return ""


def first_microbatch(t: torch.Tensor, time: Type, count: int) -> torch.Tensor:
    """The first of ``count`` microbatches of a tensor.

    It holds the first chunk of each piece that the model takes of the batch.
    """
    if not time.is_shard:
        return t
    return (
        t.unflatten(time.dim, (time.pieces, count, -1))
        .select(time.dim + 1, 0)
        .flatten(time.dim, time.dim + 1)
    )


def repeated_microbatch(t: torch.Tensor, time: Type, count: int) -> torch.Tensor:
    """A tensor of which each of ``count`` microbatches is ``t``, the inverse of
    :func:`first_microbatch`.
    """
    if not time.is_shard:
        return t
    parts = t.unflatten(time.dim, (time.pieces, 1, -1))
    return parts.repeat_interleave(count, time.dim + 1).flatten(time.dim, time.dim + 2)
