"""The state of pipelined programs and their optimizers in checkpoints: saved on one layout,
restored on others, or refused.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from typing import Any

import pytest
import staged
import torch
import torch.distributed.checkpoint as dcp
from equivalence import full
from pool import Pools
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.errors import RunError

PIPELINE = staged.Case(2, "1f1b", options=dict(micro_batch_size=4))
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Layers(nn.Module):
    """Stages whose parameters have the same shapes."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as for weight decay, with different learning rates."""
    groups = [
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim == 1],
    ]
    return torch.optim.AdamW([dict(params=groups[0], lr=0.1), dict(params=groups[1], lr=0.05)])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        model(batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def built(pipelined: bool) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    model = Layers()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # so that every value must come from the file
    if not pipelined:
        return autopar.compile(model, batch(0), 2, parallel=dict(data=2), zero=2, progress=False)
    plan = staged.staged_plan(
        model, batch(0), 2, PIPELINE.pipeline, PIPELINE.schedule, **PIPELINE.options
    )
    return autopar.compile(model, batch(0), 2, plan=plan)


def check(model: nn.Module, expected: nn.Module, what: str) -> None:
    for name, p in model.named_parameters():
        true = expected.get_parameter(name).detach()
        torch.testing.assert_close(
            full(p).detach(), true, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{what}, {n}: {m}"
        )


def _refuses_whole_state_dicts(compiled: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
    ):
        with pytest.raises(RunError, match="dcp_to_torch_save"):
            get_state_dict(compiled, optimizer, options=options)
        with pytest.raises(RunError, match="dcp_to_torch_save"):
            get_model_state_dict(compiled, options=options)


def _saved_again(path: str, to: str) -> None:
    """A program without a pipeline reads a checkpoint, and writes another for a pipeline."""
    model = built(False)
    optimizer = optimizer_of(model)
    model_state, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=path)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=to)


def _by_number(start: dict[str, Any], plain: str, straight: nn.Module) -> None:
    """The state dict of an optimizer that has stepped, without torch's functions."""
    compiled = built(pipelined=True)
    optimizer = optimizer_of(compiled)
    steps(compiled, optimizer, range(1))
    compiled.load_state_dict(_after_two(start))
    state = {"optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=plain)
    optimizer.load_state_dict(state["optimizer"])
    steps(compiled, optimizer, range(2, 4))
    check(compiled, straight, "by number")


def _by_name(first: str, second: str, plain: str) -> None:
    straight = Layers()
    ahead = optimizer_of(straight)
    start = copy.deepcopy(straight.state_dict())
    steps(straight, ahead, range(2))

    compiled = built(pipelined=True)
    compiled.load_state_dict(start)
    optimizer = optimizer_of(compiled)
    steps(compiled, optimizer, range(2))
    model_state, state = get_state_dict(compiled, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=first)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=plain)
    saved = dcp.FileSystemReader(plain).read_metadata().state_dict_metadata
    assert {f"optimizer.state.{n}.exp_avg" for n, _ in straight.named_parameters()} <= set(saved)
    _refuses_whole_state_dicts(compiled, optimizer)
    steps(straight, ahead, range(2, 4))
    for pipelined, path in ((True, first), (False, first), (True, second)):
        restored = built(pipelined)
        fresh = optimizer_of(restored)
        model_state, state = get_state_dict(restored, fresh, options=FLAT)
        dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=path)
        set_state_dict(
            restored, fresh, model_state_dict=model_state, optim_state_dict=state, options=FLAT
        )
        steps(restored, fresh, range(2, 4))
        check(restored, straight, f"by name, pipelined: {pipelined}")
        if not pipelined:
            _saved_again(first, second)

    del compiled, optimizer, restored, fresh, state, model_state
    _by_number(start, plain, straight)
    gc.collect()
    # The programs are gone, and torch's functions are as they were.
    assert torchs._verify_options.__module__ == torchs.__name__


def _after_two(start: dict[str, Any]) -> dict[str, Any]:
    model = Layers()
    model.load_state_dict(start)
    steps(model, optimizer_of(model), range(2))
    return model.state_dict()


def test_optimizer_state_of_a_pipeline_goes_by_names(ranks: Pools) -> None:
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        tempfile.TemporaryDirectory() as plain,
    ):
        ranks(2).run(_by_name, first, second, plain, timeout=120)
