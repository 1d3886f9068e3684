"""A model with a sample of its input, traced once for all uses of its graph, in this call and in
later calls.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autopar.capture.capture_graph import capture
from autopar.capture.export_program import no_garbage_collection
from autopar.capture.exported_graph import state_of
from autopar.capture.frozen_values import FrozenValues
from autopar.capture.hooks import check_modules
from autopar.capture.interception import check_no_hooks_of_all_modules
from autopar.capture.module_state import attributes_restored
from autopar.capture.process_state import process_state, random_states
from autopar.capture.sample_call import traced_call
from autopar.capture.state_parts import UnknownStateError
from autopar.capture.trace_state import TraceState
from autopar.cost_model import Cluster
from autopar.errors import CaptureError
from autopar.frontend import kept_models
from autopar.frontend.kept_models import KEPT_MODELS, ModelGraphs
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.ir.precision import dtype_of
from autopar.ir.schedules import registered_orders
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.passes.canonical.repeat_layers import NotRepeatedError
from autopar.passes.microbatch.derive_microbatch import derive_microbatch
from autopar.profile.missing_kernels import MissingKernels
from autopar.rules.analysis import Analysis
from autopar.rules.registry import registered_makers
from autopar.runtime.module.compiled import Compiled
from autopar.search.inner.search_cache import SearchCache
from autopar.search.space.modes.registry import registered_modes


class TracedModel:
    """A model and a sample. Each graph is traced at its first use, unless an earlier call with the
    same model and sample has traced it, and nothing changed that a trace may read.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        loss_fn: LossFunction | None,
        precision: str | None = None,
    ) -> None:
        if isinstance(model, Compiled):
            raise CaptureError("the model is compiled already: give the model that was compiled")
        check_no_hooks_of_all_modules(CaptureError)
        if isinstance(model, nn.Module):  # the check of the options refuses other values
            check_modules(model)
        if isinstance(loss_fn, nn.Module):
            check_modules(loss_fn)
        self.model, self.sample, self.loss_fn, self.precision = (
            model,
            plain_sample(sample),
            loss_fn,
            precision,
        )

    @cached_property
    def graphs(self) -> ModelGraphs:
        """The graphs, which later calls share."""
        state, before = self._state(), random_states()
        kept = KEPT_MODELS.find(self.model, state) if state is not None else None
        if kept is not None:
            return kept
        graphs = ModelGraphs(
            _trace(self.model, self.sample, self.loss_fn, self.precision), self.model
        )
        # A graph with drawn numbers is not that of the next trace.
        if state is not None and random_states() == before:
            KEPT_MODELS.keep(self.model, state, graphs)
        return graphs

    def _state(self) -> TraceState | None:
        """All that a trace of the model may read; None where it cannot be told, or nobody asks."""
        if not kept_models.MOST_MODELS:
            return None
        model, asked = self.model, (self.sample, self.loss_fn, self.precision)
        given = [t for t in tree_leaves(self.sample) if isinstance(t, torch.Tensor)]
        try:
            with no_garbage_collection():
                registered = registered_makers(), registered_modes(), registered_orders()
                roots = (model, *asked, process_state(), *registered)
                return TraceState(roots, (*model.parameters(), *model.buffers(), *given))
        except UnknownStateError:
            return None

    @cached_property
    def whole(self) -> CapturedModel:
        """The graph of the whole batch."""
        return self._with_tensors(self.graphs.whole)

    def frozen_values(self) -> FrozenValues:
        """The values that the graph has from its trace, as they are now."""
        traced, _, _ = traced_call(self.model, self.sample, self.loss_fn)
        whole = self.graphs.whole
        return FrozenValues(traced, whole.attributes_read, whole.tensors_read)

    def _with_tensors(self, captured: CapturedModel) -> CapturedModel:
        """``captured`` with the tensors of the model in place of meta tensors."""
        tensors = state_of(self.model)[0] | self.graphs.constants
        return replace(captured, state={name: tensors[name] for name in captured.state})

    def analyse(self, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
        """The graph of one microbatch, and the graph of the values that are computed once for all
        microbatches; None for the latter where there are none.
        """
        kept, prologue = self._analyse(microbatches)
        analysis = copy.copy(kept)
        analysis.captured = self._with_tensors(kept.captured)
        return analysis, prologue

    def _analyse(self, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
        known = self.graphs.analyses
        with self.graphs.lock:
            if 1 not in known:
                known[1] = Analysis(self.graphs.whole), None
            if microbatches not in known:
                known[microbatches] = _in_parts(known[1][0], microbatches)
            return known[microbatches]

    def search_cache(
        self, microbatches: int, cluster: Cluster, profile_missing: bool = False
    ) -> SearchCache:
        """The cache of a search with this many microbatches.

        The graph of one microbatch serves searches with any size of microbatch, so all numbers of
        microbatches above one share a cache.
        """
        is_cut, graphs = microbatches > 1, self.graphs

        def make() -> SearchCache:
            return SearchCache(
                self._searched(microbatches),
                cluster,
                self.precision == "tf32",
                MissingKernels(cluster) if profile_missing else None,
                like=graphs.latest_cache.get(is_cut),
            )

        cache = graphs.caches.of((is_cut, cluster, profile_missing), make)
        graphs.latest_cache[is_cut] = cache
        return cache

    def _searched(self, microbatches: int) -> Analysis:
        """The graph of a microbatch of any size, on which all searches work."""
        searched = self.graphs.searched
        if microbatches == 1:
            return self._analyse(1)[0]
        if searched is None:
            searched = self.graphs.searched = self._analyse(microbatches)[0]
        return searched

    def traced_in_evaluation(self) -> CapturedModel:
        """The graph of the whole batch in ``eval()``, traced by each call."""
        return _trace(self.model, self.sample, self.loss_fn, self.precision, training=False)


def _in_parts(whole: Analysis, microbatches: int) -> tuple[Analysis, fx.Graph | None]:
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
    with attributes_restored(traced_call(model, sample, loss_fn)[0]):
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
