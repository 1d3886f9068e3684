"""Runs on each rank: a compiled model's loss, outputs and gradients against the same model on one
device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode

import autopar
import autopar.api
import autopar.frontend.traced_model
from autopar.passes.lowering.evaluation_mode import EvaluationMode

Made = TypeVar("Made")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Double(TorchFunctionMode):
    """Keeps float64 where a model casts to float32: transformers' normalisations, rotary embeddings
    and losses do.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            if func is torch.Tensor.float:
                return args[0].double()
            if func is torch.Tensor.to and args[0].dtype == torch.float64:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {
                    k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()
                }
        return func(*args, **(kwargs or {}))


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor, of a DTensor or a plain one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def loss_of(output: Any) -> torch.Tensor:
    """The loss among what a zoo model returns."""
    return output if isinstance(output, torch.Tensor) else output["loss"]


def error(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """The largest difference, relative to the largest expected value (or ``scale``, where that is
    more).
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    result = float((found - expected).abs().max() / max(float(expected.abs().max()), scale, 1e-30))
    return result if result == result else float("inf")


@dataclasses.dataclass
class Step:
    """What one step makes: the loss and the other outputs, gradients and buffers by name, all
    whole.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def step(model: nn.Module, sample: Mapping[str, Any]) -> Step:
    """One forward and backward of a model, compiled or not."""
    output = model(**sample)
    loss_of(output).backward()
    named = (
        {"loss": output}
        if isinstance(output, torch.Tensor)
        else {k: v for k, v in output.items() if isinstance(v, torch.Tensor)}
    )
    return Step({name: full(value).detach() for name, value in named.items()}, *_state(model))


def step_in_parts(
    model: nn.Module, sample: Mapping[str, torch.Tensor], parts: int, ranks: int
) -> Step:
    """The same by hand, in ``parts`` microbatches of a batch that is cut over ``ranks``: gradient
    accumulation on one device.
    """

    def chunk(x: torch.Tensor, part: int) -> torch.Tensor:
        return x.unflatten(0, (ranks, parts, -1))[:, part].flatten(0, 1)

    done = []
    for part in range(parts):
        output = model(**{name: chunk(x, part) for name, x in sample.items()})
        (loss_of(output) / parts).backward()
        done.append({name: value.detach() for name, value in output.items()})
    outputs = {"loss": torch.stack([o.pop("loss") for o in done]).mean()}
    for name in done[0]:
        whole = torch.stack([o[name].unflatten(0, (ranks, -1)) for o in done], 1)
        outputs[name] = whole.flatten(0, 2)
    return Step(outputs, *_state(model))


def _state(model: nn.Module) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    gradients = {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
    return gradients, {n: full(b).clone() for n, b in model.named_buffers()}


def own(expected: Step, found: Step) -> Step:
    """``expected`` without the parameters and buffers that other ranks hold."""
    return Step(
        expected.outputs,
        {name: expected.gradients[name] for name in found.gradients},
        {name: expected.buffers[name] for name in found.buffers},
    )


def vanishing(expected: Step) -> set[str]:
    """The parameters whose gradient is zero but for rounding, and the outputs that are,
    ``expected`` being in float64.

    A bias that a LayerNorm takes out again, for one. In float32 such a gradient is noise on one
    device too: the mixer's is 2e-5 of a thousandth of the largest gradient there, where 0 would be
    right.
    """
    found = set[str]()
    for tensors in (expected.gradients, expected.outputs):
        sizes = {
            name: float(t.abs().max()) for name, t in tensors.items() if t is not None and t.numel()
        }
        found |= {name for name, size in sizes.items() if size < 1e-12 * max(sizes.values())}
    return found


def differences(found: Step, expected: Step, vanishes: Collection[str] = ()) -> dict[str, float]:
    """Relative errors of the outputs, of each gradient (against a thousandth of the largest at
    least) and of the buffers.

    Gradients and outputs that ``vanishes`` names are measured against the largest.
    """
    most = max((float(t.abs().max()) for t in expected.outputs.values() if t.numel()), default=0.0)
    errors = {
        name: error(value, expected.outputs[name], most if name in vanishes else 0.0)
        for name, value in found.outputs.items()
    }
    assert "loss" in errors
    assert list(found.gradients) == list(expected.gradients)
    largest = max(
        (float(g.abs().max()) for g in expected.gradients.values() if g is not None), default=0.0
    )  # a stage may have none
    for name, gradient in expected.gradients.items():
        mine = found.gradients[name]
        assert (gradient is None) == (mine is None), f"{name}: one of the gradients is missing"
        if gradient is not None and mine is not None:
            errors[name] = error(mine, gradient, largest if name in vanishes else 1e-3 * largest)
    for name, buffer in found.buffers.items():
        errors[name] = error(buffer.double(), expected.buffers[name].double())
    return errors


def compare(model: nn.Module, sample: Mapping[str, Any], compiled: nn.Module) -> dict[str, float]:
    """Relative errors of the loss, of each output and each gradient; ``model`` has not been run
    yet.
    """
    expected = step(model, sample)
    return differences(step(compiled, sample), expected)


def worst_of_plans(
    model: nn.Module, sample: Mapping[str, Any], world_size: int, plans: Mapping[str, Any]
) -> dict[str, float]:
    """The largest error of a step under each plan; runs on each rank. A rank of a pipeline is
    compared in what it holds.
    """
    expected, found = step(copy.deepcopy(model), sample), {}
    for label, options in plans.items():
        compiled = autopar.compile(
            copy.deepcopy(model), sample, world_size, progress=False, **options
        )
        done = step(compiled, sample)
        is_pipeline = "pipeline" in options.get("parallel", {})
        found[label] = worst(differences(done, own(expected, done) if is_pipeline else expected))[0]
    return found


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest error, and of what."""
    return max((e, name) for name, e in errors.items())


@contextmanager
def traced_once() -> Iterator[None]:
    """Within, the one model is traced once for each number of microbatches: that takes longer than
    all the rest of a test.
    """
    trace, in_parts = autopar.frontend.traced_model._trace, autopar.frontend.traced_model._in_parts
    traced: dict[Any, Any] = {}
    known: dict[Any, Any] = {}

    def once(model: Any, sample: Any, loss_fn: Any, precision: str | None) -> Any:
        key = autopar.frontend.traced_model.batch_size(sample), precision
        if key not in traced:
            traced[key] = trace(model, sample, loss_fn, precision)
        return traced[key]

    def cached(whole: Any, microbatches: int) -> Any:
        key = microbatches, id(whole.graph)  # which `traced` keeps
        if key not in known:
            known[key] = in_parts(whole, microbatches)
        return known[key]

    with (
        mock.patch.object(autopar.frontend.traced_model, "_trace", once),
        mock.patch.object(autopar.frontend.traced_model, "_in_parts", cached),
        mock.patch.object(
            autopar.api, "EvaluationTrace", return_value=SimpleNamespace(mode=EvaluationMode)
        ),  # tests/test_evaluation_mode.py tests it
        mock.patch.object(
            autopar.api, "_verify", return_value=[]
        ),  # and test_check.py of this; what is compared here is the whole
    ):
        yield


def shared(jobs: Mapping[str, Callable[[], Made]]) -> dict[str, Made]:
    """What each of the jobs makes, on all ranks, where each rank has done its part of them:
    planning is most of a test's work.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {key: make() for i, (key, make) in enumerate(jobs.items()) if i % world == rank}
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, mine)
    made = {key: value for part in everywhere for key, value in part.items()}
    return {key: made[key] for key in jobs}


@dataclasses.dataclass
class Outcome:
    """Of one configuration: the worst error and of what, and the plan."""

    worst: tuple[float, str]
    plan: autopar.Plan


def check(
    name: str,
    dtype: torch.dtype,
    configurations: dict[str, dict[str, Any]],
    device: str = "cpu",
) -> dict[str, Outcome]:
    """One zoo model under each configuration of compile's options; the first is planned by compile
    itself.
    """
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    found = {}
    model, sample = zoo.on(device, getattr(zoo, name)(dtype=dtype))
    with Double():
        vanishes = vanishing(step(*getattr(zoo, name)(dtype=torch.float64)))
    normalises = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    with traced_once(), Double() if dtype == torch.float64 else contextlib.nullcontext():
        whole, world = step(copy.deepcopy(model), sample), dist.get_world_size()
        rest = list(configurations.items())[1:]
        plans = shared(
            {
                label: partial(autopar.plan, model, sample, world, progress=False, **options)
                for label, options in rest
            }
        )
        for label, options in configurations.items():
            try:
                given = dict(plan=plans[label]) if label in plans else options
                compiled = autopar.compile(model, sample, world, progress=False, **given)
                plan, expected = compiled.plan, whole
                if normalises and plan.microbatches > 1:  # statistics are of a microbatch
                    expected = step_in_parts(
                        copy.deepcopy(model), sample, plan.microbatches, plan.data_degree
                    )
                mine = step(compiled, sample)
                here = (
                    own(expected, mine) if plan.pipeline > 1 else expected
                )  # else every rank has all
                found[label] = Outcome(worst(differences(mine, here, vanishes)), plan)
            except Exception as e:
                raise AssertionError(f"{name}, {label}: {e}") from e
    return found
