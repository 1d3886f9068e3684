"""The graphs of the models that were traced last, and what searches found of them. They are kept
for the next call with the same model and sample, as long as the model exists and is the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from torch import fx, nn

from autopar.capture.exported_graph import state_of
from autopar.capture.trace_state import TraceState
from autopar.frontend.kept_plans import KeptPlans
from autopar.ir.captured import CapturedModel
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.runtime.parameters.model_state import with_meta_state
from autopar.search.inner.lru_cache import LruCache
from autopar.search.inner.search_cache import MOST_PLAN_BYTES, SearchCache
from autopar.search.result.priced_plan import PricedPlan

MOST_MODELS = 4  # a model's graphs and prices take some ten megabytes; with 0, none is kept
MOST_CACHES = 8  # of a model: two a cluster
MOST_WRITTEN = 4  # of a model: plans as data, with the searches' own


class ModelGraphs:
    """The graphs of one model and sample, without the model's tensors.

    Attributes:
        whole: the graph of the whole batch, with meta tensors for the model's.
        constants: the tensors that the trace itself made, or found beside parameters and buffers.
        analyses: the graph of one microbatch, and of what is computed once for all of them, by the
            number of microbatches.
        searched: the graph of a microbatch of any size, on which all searches work.
        caches: what searches share, by cluster.
        latest_cache: the cache used last, for one microbatch and for several.
        plans: the plans that searches found to their end.
        written: plans as data, by what the search decided.
        lock: is held while a search changes the graphs' shapes for a time.
    """

    def __init__(self, captured: CapturedModel, model: nn.Module) -> None:
        own = state_of(model)[0]
        self.constants = {
            name: tensor for name, tensor in captured.state.items() if own.get(name) is not tensor
        }
        self.whole = with_meta_state(captured)
        self.analyses: dict[int, tuple[Analysis, fx.Graph | None]] = {}
        self.searched: Analysis | None = None
        self.caches = LruCache[SearchCache](MOST_CACHES)
        self.latest_cache: dict[bool, SearchCache] = {}
        self.plans = KeptPlans()
        self.written = LruCache[tuple[PricedPlan, Plan]](
            MOST_WRITTEN, lambda pair: pair[0].nbytes, MOST_PLAN_BYTES
        )
        self.lock = RLock()


@dataclass
class _Kept:
    """The graphs of a model that exists, and the state that they were traced in."""

    model: weakref.ref[nn.Module]
    state: TraceState
    graphs: ModelGraphs


@dataclass
class KeptModels:
    """The graphs of the models that were used last, the latest at the end."""

    _kept: list[_Kept] = field(default_factory=list)
    _lock: Any = field(default_factory=RLock)

    def find(self, model: nn.Module, state: TraceState) -> ModelGraphs | None:
        """The graphs of a model in this state; None where there are none."""
        with self._lock:
            for each in self._kept:
                if each.model() is model and each.state.is_equal(state):
                    self._kept.remove(each)
                    self._kept.append(each)
                    return each.graphs
        return None

    def keep(self, model: nn.Module, state: TraceState, graphs: ModelGraphs) -> None:
        """Keeps the graphs of a model in this state, until the model is gone or others follow."""
        with self._lock:
            self._kept.append(_Kept(weakref.ref(model, self._forget), state, graphs))
            del self._kept[: max(0, len(self._kept) - MOST_MODELS)]

    def _forget(self, model: weakref.ref[nn.Module]) -> None:
        with self._lock:
            self._kept[:] = [each for each in self._kept if each.model is not model]

    def clear(self) -> None:
        """Forgets all models."""
        with self._lock:
            self._kept.clear()


KEPT_MODELS = KeptModels()  # of this process
