"""Runs torch.export. Where it fails, one line says where and why."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture import function_tracer, layer_reads, layer_tracer, refused_calls
from autopar.capture.function_tracer import FunctionTracer
from autopar.capture.layer_tracer import LayerTracer
from autopar.capture.module_state import attributes_of, put_back
from autopar.errors import CaptureError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TRIES = 3  # of a trace in which layers hide their tensors
_Exported = tuple[torch.export.ExportedProgram, FunctionTracer]
# files whose frames are no source of a node
_OWN_FILES = tuple(
    module.__file__
    for module in (contextlib, function_tracer, layer_reads, layer_tracer, refused_calls)
)


def export(
    traced: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
    repeat_layers: bool = False,
) -> torch.export.ExportedProgram:
    """``torch.export.export`` of ``traced``.

    Args:
        repeat_layers: whether to trace few layers of each kind; see
            :mod:`autopar.capture.layer_tracer`.

    Raises:
        CaptureError: the export failed; the message names the module in ``model`` and the line.
    """
    try:
        layers = LayerTracer(traced, model) if repeat_layers else None
        tries = range(_TRIES if layers is not None else 0)
        with_hidden = (_with_hidden_tensors(traced, args, kwargs, layers) for _ in tries)
        found = next((exported for exported in with_hidden if exported is not None), None)
        program, met = found or _export(traced, args, kwargs, layers, hide=False)
    except Exception as error:
        raise CaptureError(_explain(error, model)) from error
    met.insert_into(program.graph, lambda node: source_line(node.meta.get("stack_trace") or ""))
    return program


def _with_hidden_tensors(
    traced: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layers: Any
) -> _Exported | None:
    """An export in which layers hide their tensors; None if it needs one of them."""
    before = attributes_of(traced)
    try:
        exported = _export(traced, args, kwargs, layers, hide=True)
    except Exception:
        if not layers.is_incomplete:
            raise
    else:
        if not layers.is_incomplete and not layers.has_hidden(exported[0].constants.values()):
            return exported
    layers.put_back_state()
    put_back(before)
    return None


def _export(
    traced: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layers: LayerTracer | None,
    hide: bool,
) -> _Exported:
    # A lazy graph module saves a quarter of the time: otherwise export generates the graph's Python
    # code after each of its passes.
    with (
        no_garbage_collection(),
        _quiet(),
        _use_lazy_graph_module(True),
        FunctionTracer().tracing() as met,
        layers.tracing(hide) if layers is not None else nullcontext(),
        _data_of_parameters() as lifted,
    ):
        program = torch.export.export(traced, args, kwargs, strict=False)
    for name, constant in program.constants.items():
        if id(constant) in lifted:
            program.constants[name] = lifted[id(constant)][0]
    return program, met


@contextmanager
def _data_of_parameters() -> Iterator[dict[int, tuple[nn.Parameter, torch.Tensor]]]:
    """Within, the mapping that this returns gets each parameter whose ``data`` is read, and this
    tensor, by the tensor's id. Export makes constants of parameters outside of the model so.
    """
    found: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}

    def data(parameter: nn.Parameter) -> torch.Tensor:
        value = torch.Tensor.data.__get__(parameter)  # type: ignore[attr-defined]
        found[id(value)] = parameter, value
        return value

    def set_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]

    with mock.patch.object(nn.Parameter, "data", property(data, set_data), create=True):
        yield found


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Without the collector, tracing is a sixth faster, and so are passes over a whole graph: they
    allocate many objects, and little garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the partial graph that torch prints and the trace that it logs when export fails.

    The CaptureError says the same in one line and has torch's error as its cause.
    """
    level = logging.root.manager.disable
    logging.disable(max(level, logging.ERROR))
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # Export also warns of attributes that weight_norm sets. The comparison of model and
            # graph finds attributes that a later call would read.
            warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")
            # Export itself causes this warning under autograd.grad.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            # Python code cannot name ``aten.random.from``; nothing here runs the generated code.
            warnings.filterwarnings("ignore", "Unable to execute the generated python source code")
            yield
    finally:
        logging.disable(level)


def _explain(error: BaseException, model: nn.Module) -> str:
    """A message with the module, the line, the problem and the usual remedy."""
    names = {id(m): name for name, m in model.named_modules()}
    module = source = ""
    innermost: nn.Module | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        this = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(this, nn.Module) and id(this) in names:
            module = f"{names[id(this)] or '(root)'} ({type(this).__name__})"
            innermost = this
        if not _inside_torch(code.co_filename) and code.co_filename != __file__:
            source = f" at {_short(code.co_filename)}:{line}"
    place = f"in module {module}" if module else "outside its modules"
    if isinstance(error, CaptureError):
        return f"the model could not be captured, {place}{source}: {error}"
    what, advice = _advice(error)
    if isinstance(innermost, _BatchNorm) and innermost.momentum is None:
        what = (
            "momentum=None, the average over all batches so far, divides by a number that is "
            "counted in a tensor"
        )
        advice = "A graph has no such numbers: give it a momentum"
    return f"the model could not be captured, {place}{source}: {what}. {advice}"


def _advice(error: BaseException) -> tuple[str, str]:
    """The problem and the usual remedy."""
    first = next((line.strip(" .") for line in str(error).splitlines() if line.strip()), "")
    what = f"{type(error).__name__}: {first}"
    text = f"{what} {error}".lower()
    if "data-dependent" in text or "datadependent" in text:
        return (
            "the Python code branches or loops on the value of a tensor",
            "Write it with torch.where or a mask. Mixture-of-experts models of transformers: "
            'experts_implementation="batched_mm" or the default, not "eager"',
        )
    if "cache" in text:
        return what, "The model returns a cache: pass use_cache=False"
    if isinstance(error, TypeError):
        return (
            what,
            "sample_input must hold the arguments of the model's forward: a tensor, a tuple of "
            "them, or a dict of keywords",
        )
    return (
        what,
        "Check that the model runs on this input by itself; Python state and values read from "
        "tensors cannot be captured",
    )


def _inside_torch(path: str) -> bool:
    return path.startswith((_TORCH, "<")) or path in _OWN_FILES


def _short(path: str) -> str:
    """The name of the file, with the name of its folder."""
    return "/".join(path.replace(os.sep, "/").split("/")[-2:])


def source_line(trace: str) -> str:
    """``folder/file.py:12`` of the innermost frame of a stack trace, outside torch if possible."""
    frames = [
        line.strip().split('"', 2)
        for line in trace.splitlines()
        if line.lstrip().startswith('File "')
    ]
    places = [(path, rest.split("line ", 1)[1].split(",", 1)[0]) for _, path, rest in frames]
    path, line = next(
        (p for p in reversed(places) if not _inside_torch(p[0])), places[-1] if places else ("", "")
    )
    return f"{_short(path)}:{line}" if path else ""
