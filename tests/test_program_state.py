"""The state of a compiled module: checkpoints, state dicts and models on the meta device."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import handmade
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pools
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from autopar.errors import RunError

WORLD = {"one": 1, "data": 2, "zero": 2, "columns": 2, "slice": 2, "grid": 4, "data4": 4}
# torch saves no AdamW state for a parameter that never had a gradient, and asks for it when
# loading.
_PARTIAL = partial(DefaultLoadPlanner, allow_partial_load=True)


def _save(case: str, path: str) -> None:
    compiled = handmade.build(case)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    for step in range(3):
        compiled(**handmade.batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(
        {
            "model": compiled.state_dict(),
            "optimizer": get_optimizer_state_dict(compiled, optimizer),
        },
        checkpoint_id=path,
    )


def _load(case: str, path: str) -> torch.Tensor:
    compiled = handmade.build(case, seed=7)
    compiled.scale.copy_(handmade.Network().scale)  # not persistent
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    state = {
        "model": compiled.state_dict(),
        "optimizer": get_optimizer_state_dict(compiled, optimizer),
    }
    dcp.load(state, checkpoint_id=path, planner=_PARTIAL())
    compiled.load_state_dict(state["model"])
    set_optimizer_state_dict(compiled, optimizer, state["optimizer"])
    compiled(**handmade.batch(3))["loss"].backward()
    optimizer.step()
    return compiled(**handmade.batch(4))["loss"].detach()


def _plain(path: str | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = handmade.Network(7 if path else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if path:
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=path, planner=_PARTIAL(), no_dist=True)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(3) if path is None else ():
        model(**handmade.batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


# One process saves on purpose.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("case", ["zero", "grid"])
def test_checkpoints_move_between_programs_and_plain_models(ranks: Pools, case: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "step3")
        ranks(WORLD[case]).run(_save, case, path)
        (straight, first), (loaded, second) = _plain(None), _plain(path)
        for (name, value), (_, other) in zip(
            straight.state_dict().items(), loaded.state_dict().items(), strict=True
        ):
            torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-14, msg=name)
        for p, q in zip(straight.parameters(), loaded.parameters(), strict=True):
            for name, value in first.state[p].items():
                torch.testing.assert_close(
                    second.state[q][name], value, rtol=1e-10, atol=1e-16, msg=name
                )
        straight(**handmade.batch(3))["loss"].backward()
        first.step()
        expected = straight(**handmade.batch(4))["loss"]
        for other in (case, "columns"):
            for found in ranks(WORLD[other]).run(_load, other, path):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def _plain_state_dict(case: str) -> None:
    other, compiled = handmade.Network(3), handmade.build(case)
    compiled.load_state_dict(other.state_dict())
    compiled.scale.copy_(other.scale)  # not persistent
    torch.testing.assert_close(
        compiled(**handmade.batch())["loss"].detach(),
        other(**handmade.batch())["loss"].detach(),
        rtol=1e-13,
        atol=0,
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        compiled.load_state_dict({**other.state_dict(), "fc1.bias": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        compiled.load_state_dict({})


@pytest.mark.parametrize("case", ["one", "grid"])
def test_load_a_plain_models_state_dict(ranks: Pools, case: str) -> None:
    ranks(WORLD[case]).run(_plain_state_dict, case)


def _meta(everywhere: bool) -> None:
    rank, model = dist.get_rank(), handmade.Network(5)
    if everywhere:
        with pytest.warns(
            UserWarning,
            match=r"8 tensors have no values until they are loaded.*constants.*: calls, scale",
        ):
            compiled = handmade.build("zero", model=handmade.Network(5).to("meta"))
        with pytest.raises(RunError, match=r"8 tensors have no values: .*named_buffers"):
            compiled(**handmade.batch())
        compiled.load_state_dict(model.state_dict())
        with pytest.raises(RunError, match=r"1 tensors have no values: scale\."):
            compiled(**handmade.batch())
        compiled.scale.copy_(model.scale)
    else:
        compiled = handmade.build(
            "zero", model=model if rank == 0 else handmade.Network(5).to("meta")
        )
    assert compiled.fc1.weight.to_local().device.type == "cpu"
    torch.testing.assert_close(
        compiled(**handmade.batch())["loss"], model(**handmade.batch())["loss"], rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_model_on_the_meta_device(ranks: Pools, everywhere: bool) -> None:
    ranks(2).run(_meta, everywhere)
