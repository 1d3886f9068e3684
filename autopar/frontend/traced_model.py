"""A model with a sample of its input, traced once for all uses of its graph."""

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
from autopar.passes.canonical.repeat_layers import NotRepeatedError
from autopar.passes.lowering.evaluation_mode import EvaluationMode, find_evaluation_mode
from autopar.passes.microbatch.derive_microbatch import derive_microbatch
from autopar.profile.missing_kernels import MissingKernels
from autopar.rules.analysis import Analysis
from autopar.search.inner.search_cache import SearchCache


class TracedModel:
    """A model and a sample. Each graph is traced at its first use."""

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        loss_fn: LossFunction | None,
        precision: str | None = None,
    ) -> None:
        if isinstance(model, nn.Module):  # the check of the options refuses other values
            check_hooks(model)
        self.model, self.sample, self.loss_fn, self.precision = (
            model,
            plain_sample(sample),
            loss_fn,
            precision,
        )
        self._analyses: dict[int, tuple[Analysis, fx.Graph | None]] = {}
        self._caches: dict[tuple[bool, Cluster, bool], SearchCache] = {}

    @cached_property
    def whole(self) -> CapturedModel:
        """The graph of the whole batch."""
        return _trace(self.model, self.sample, self.loss_fn, self.precision)

    @cached_property
    def _analysis(self) -> Analysis:
        return Analysis(self.whole)

    def analyse(self, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
        """The graph of one microbatch, and the graph of the values that are computed once for all
        microbatches; None for the latter where there are none.
        """
        if microbatches not in self._analyses:
            self._analyses[microbatches] = _in_parts(self._analysis, microbatches)
        return self._analyses[microbatches]

    def search_cache(
        self, microbatches: int, cluster: Cluster, profile_missing: bool = False
    ) -> SearchCache:
        """The cache of a search with this many microbatches.

        The graph of one microbatch serves searches with any size of microbatch, so all numbers of
        microbatches above one share a cache.
        """
        key = microbatches > 1, cluster, profile_missing
        if key not in self._caches:
            known = (c for (is_cut, *_), c in self._caches.items() if is_cut == key[0])
            other = next(known, None)
            analysis = other.analysis if other else self.analyse(microbatches)[0]
            self._caches[key] = SearchCache(
                analysis,
                cluster,
                self.precision == "tf32",
                MissingKernels(cluster) if profile_missing else None,
            )
        return self._caches[key]

    @cached_property
    def evaluation_mode(self) -> EvaluationMode:
        """The changes that ``eval()`` makes to the graph."""
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
    """Traces the model with all modules in the same mode.

    A plan is for training. Passes derive the graph of modules in ``eval()`` from it.
    """
    with attributes_restored(model):
        for module in model.modules():
            module.training = training
        dtype = dtype_of(precision)
        try:
            return canonicalise(capture(model, sample, loss_fn, dtype, repeat_layers=True))
        except NotRepeatedError:
            return canonicalise(capture(model, sample, loss_fn, dtype))


def plain_sample(sample: Any) -> Any:
    """``sample``, with a mapping such as a tokenizer's BatchEncoding as a plain dict."""
    return dict(sample) if isinstance(sample, Mapping) else sample


def batch_size(sample: Any) -> int:
    """The most common size of dim 0 of the sample's tensors; 1 for a sample without tensors."""
    sizes: list[int] = []
    tree_map(
        lambda x: sizes.append(x.shape[0]) if isinstance(x, torch.Tensor) and x.ndim else None,
        sample,
    )
    return max(sizes, key=sizes.count) if sizes else 1
