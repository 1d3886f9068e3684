"""How ``eval()`` changes a program: traced when a call first needs it.

A model that only trains is traced once. The trace of its ``eval()`` needs the model's code and no
weights, so a twin without memory (``model_twin``) stands for the model until then. Each rank traces
by itself, because ranks whose modes differ must not wait for each other. The ranks then compare
what they found, as a part of the program's mode, before anything is computed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from autopar.capture.process_state import active_modes
from autopar.frontend.model_twin import NoTwinError, twin_of
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import CapturedModel
from autopar.ir.plan_data import PlanData
from autopar.passes.lowering.evaluation_mode import EvaluationMode, find_evaluation_mode
from autopar.passes.lowering.lower import LoweredModel, lower
from autopar.rules.analysis import Analysis
from autopar.runtime.parameters.model_state import with_meta_state

_DEVICES = ("cpu", "cuda")


class EvaluationTrace:
    """The difference between a model's training and its ``eval()``, which is traced at the first
    use. It is traced at once where the model has no twin, or where torch's state of this thread
    (autocast, a mode) may change what a trace sees.

    Raises:
        CaptureError: the model is traced at once, and cannot be traced in ``eval()``.
    """

    def __init__(self, traced: TracedModel) -> None:
        self._whole, self._dtype = traced.graphs.whole, torch.get_default_dtype()
        self._found: EvaluationMode | None = None
        self._twin = _twin(traced)
        if self._twin is None:
            self._found = find_evaluation_mode(self._whole, traced.traced_in_evaluation())

    @property
    def is_known(self) -> bool:
        """Whether the model was traced in ``eval()``."""
        return self._found is not None

    def mode(self) -> EvaluationMode:
        """The difference.

        Raises:
            CaptureError: the model cannot be traced in ``eval()``.
        """
        if self._found is None:
            # A new thread: what the caller's has switched on or off in torch, such as gradients
            # and autocast, is no part of the model.
            with ThreadPoolExecutor(1) as pool:
                self._found = pool.submit(self._trace).result()
            self._twin = None
        return self._found

    def _trace(self) -> EvaluationMode:
        assert self._twin is not None
        with _random_numbers_restored(), _default_dtype(self._dtype):
            return find_evaluation_mode(self._whole, self._twin.traced_in_evaluation())


class DeferredEvaluation:
    """Makes the program of ``eval()`` for a program that was lowered without it.

    Arguments: those of :func:`lower`, with ``captured``, the graph of its analysis, and
    ``lowered``, what it returned.
    """

    def __init__(
        self,
        trace: EvaluationTrace,
        lowered: LoweredModel,
        captured: CapturedModel,
        plan: PlanData,
        prologue: fx.Graph | None,
        device: torch.device,
    ) -> None:
        # An analysis remembers what was computed of it, which may hold the model's tensors.
        self._captured = with_meta_state(captured)
        self._trace, self._lowered = trace, lowered
        self._rest = plan, prologue, device

    def __call__(self) -> LoweredModel:
        """The programs, with that of ``eval()``.

        Raises:
            CaptureError: the model cannot be traced in ``eval()``.
        """
        mode = self._trace.mode()
        if mode.unswitched or mode.updates:
            return lower(Analysis(self._captured), *self._rest, mode)
        return replace(self._lowered, evaluation_mode=mode)


def _twin(traced: TracedModel) -> TracedModel | None:
    """The model without memory; None where there is none."""
    in_autocast = any(torch.is_autocast_enabled(device) for device in _DEVICES)
    if in_autocast or active_modes():
        return None
    try:
        model, sample = twin_of(traced.model, traced.sample, traced.loss_fn)
    except NoTwinError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same were given for the model
        return TracedModel(model, sample, traced.loss_fn, traced.precision)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _random_numbers_restored() -> Iterator[None]:
    """A forward may draw while it is traced; the training after it draws what it would have."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
