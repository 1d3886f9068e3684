"""A model and a batch, traced once for everything that is asked of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils._pytree import tree_map

from autopar.capture.capture_graph import capture
from autopar.capture.hooks import check_hooks
from autopar.capture.module_state import attributes_restored
from autopar.cost_model import Cluster
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.ir.precision import dtype_of
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.passes.lowering.evaluation_mode import EvaluationMode, find_evaluation_mode
from autopar.passes.microbatch.derive_microbatch import derive_microbatch
from autopar.profile.missing_kernels import MissingKernels
from autopar.rules.analysis import Analysis
from autopar.search.inner.search_cache import SearchCache


class TracedModel:
    """A model and a batch; what is asked of them is traced once."""

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        loss_fn: LossFunction | None,
        precision: str | None = None,
    ) -> None:
        if isinstance(model, nn.Module):  # what is none is refused with the other options
            check_hooks(model)
        self.model, self.sample, self.loss_fn, self.precision = (
            model,
            plain_sample(sample),
            loss_fn,
            precision,
        )
        self._analyses: dict[int, tuple[Analysis, fx.Graph | None]] = {}
        self._known: dict[tuple[bool, Cluster, bool], SearchCache] = {}

    @cached_property
    def whole(self) -> CapturedModel:
        """The graph of the whole batch."""
        return _trace(self.model, self.sample, self.loss_fn, self.precision)

    @cached_property
    def _analysis(self) -> Analysis:
        return Analysis(self.whole)

    def analyse(self, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
        """The graph of one microbatch, and the graph of what is counted over the batch before."""
        if microbatches not in self._analyses:
            self._analyses[microbatches] = _in_parts(self._analysis, microbatches)
        return self._analyses[microbatches]

    def known(
        self, microbatches: int, cluster: Cluster, profile_missing: bool = False
    ) -> SearchCache:
        """What is known for a search of this many microbatches: the graph of a microbatch stands
        for one of any size, so that of the first that was asked for serves them all."""
        key = microbatches > 1, cluster, profile_missing
        if key not in self._known:
            known = next((k for (parts, *_), k in self._known.items() if parts == key[0]), None)
            analysis = known.analysis if known else self.analyse(microbatches)[0]
            self._known[key] = SearchCache(
                analysis,
                cluster,
                self.precision == "tf32",
                MissingKernels(cluster) if profile_missing else None,
            )
        return self._known[key]

    @cached_property
    def evaluation_mode(self) -> EvaluationMode:
        """What ``eval()`` changes."""
        return find_evaluation_mode(
            self.whole,
            _trace(self.model, self.sample, self.loss_fn, self.precision, training=False),
        )


def _in_parts(whole: Analysis, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
    if microbatches == 1:
        return whole, None
    captured, prologue = derive_microbatch(whole, microbatches)
    return Analysis(captured), prologue


def _trace(
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None,
    precision: str | None,
    training: bool = True,
) -> CapturedModel:
    """Traced with all modules in training: what is planned is training, and passes make of it what
    any of them does in ``eval()``.
    """
    with attributes_restored(model):
        for module in model.modules():
            module.training = training
        return canonicalise(capture(model, sample, loss_fn, dtype_of(precision)))


def plain_sample(sample: Any) -> Any:
    """A dict of keywords where ``sample`` is another mapping, such as a tokenizer's
    BatchEncoding.
    """
    return dict(sample) if isinstance(sample, Mapping) else sample


def batch_size(sample: Any) -> int:
    sizes: list[int] = []
    tree_map(
        lambda x: sizes.append(x.shape[0]) if isinstance(x, torch.Tensor) and x.ndim else None,
        sample,
    )
    return max(sizes, key=sizes.count) if sizes else 1
