"""The loop that users write: optimizers, schedulers, clipping, accumulation, evaluation,
checkpoints and dropout of compiled models.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from equivalence import Double, full, loss_of
from pool import Pools
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar

STEPS = 4
GRID = dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")))
ROWS = dict(parallel=dict(tensor=dict(size=4, mode="1d")))
ZERO = dict(parallel=dict(data=4), zero=2)
PAIR = dict(parallel=dict(data=2), zero=2)
PARTS = GRID | dict(micro_batch_size=2)


def build(model: nn.Module, sample: dict[str, Any], **options: Any) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds process groups of earlier tests
    return autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )


def batch(sample: dict[str, Any], step: int) -> dict[str, Any]:
    """Another batch in the sample's shapes."""
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(len(next(iter(sample.values()))), generator=generator)
    return {k: v[order].roll(step, 1) if v.ndim == 2 else v[order] for k, v in sample.items()}


def close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9, name: str = ""
) -> None:
    expected = full(expected).detach()
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(
        full(found).detach(),
        expected,
        rtol=tolerance,
        atol=atol,
        msg=(lambda m: f"{name}: {m}") if name else None,
    )


# -- optimizer, scheduler, clipping ----------------------------------------------------------------


def optimizer_of(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW as users set it up: no weight decay on vectors, a warm-up, a decay of the rate."""
    groups = [
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim <= 1],
    ]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=0.01,
        weight_decay=0.1,
    )
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1)


def train(model: nn.Module, sample: dict[str, Any], clip: list[Any]) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    optimizer, scheduler = optimizer_of(model)
    history = []
    for step in range(STEPS):
        loss = loss_of(model(**batch(sample, step)))
        loss.backward()
        norm = clip[step % len(clip)](model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append((loss.item(), float(full(norm))))
    return history


def _trains(name: str, options: dict[str, Any]) -> None:
    with Double():
        model, sample = getattr(zoo, name)(dtype=torch.float64)
        compiled = build(model, sample, **options)
        found = train(compiled, sample, [autopar.clip_grad_norm_, nn.utils.clip_grad_norm_])
        expected = train(model, sample, [nn.utils.clip_grad_norm_])
    assert any(norm > 0.05 for _, norm in expected), "nothing is clipped"
    close(torch.tensor(found), torch.tensor(expected))
    assert expected[-1][0] != expected[0][0]
    mine = dict(compiled.named_parameters())
    for n, p in model.named_parameters():
        close(mine[n], p, 1e-7, n)


@pytest.mark.parametrize("options", [GRID, ZERO, PARTS], ids=["grid", "zero", "microbatches"])
def test_training_equals_one_device(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_trains, "llama", options)


def _assigns(options: dict[str, Any]) -> None:
    """Assigns to ``parameter.data``, as averaged weights and ``vector_to_parameters`` do."""
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, **options)
        for m in (model, compiled):
            flat = nn.utils.parameters_to_vector(m.parameters())
            nn.utils.vector_to_parameters(0.5 * flat, m.parameters())
        close(loss_of(compiled(**sample)), loss_of(model(**sample)))
        for p, mine in zip(model.parameters(), compiled.parameters(), strict=True):
            p.data = mine.data = torch.full(p.shape, 0.01, dtype=p.dtype)  # a whole tensor
        for m in (model, compiled):
            m.zero_grad()
            loss_of(m(**sample)).backward()
        for p, mine in zip(model.parameters(), compiled.parameters(), strict=True):
            close(mine, p)
            close(mine.grad, p.grad)
        wide = next(p for p in compiled.parameters() if p.ndim == 2)
        with pytest.raises(autopar.RunError, match=r"of shape .* was compiled for"):
            wide.data = torch.zeros(3, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [PAIR, dict(parallel=dict(tensor=dict(size=2, mode="1d")))], ids=["zero", "rows"]
)
def test_assigned_data_is_the_parameters(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_assigns, options)


def _draws(options: dict[str, Any]) -> None:
    """Draws new parameter values: on ranks whose seeds differ, and through ``parameter.data``, as
    transformers does.
    """
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, **options)
        rank = dist.get_rank()
        for m, seed in ((model, 5), (compiled, 5 + rank)):
            torch.manual_seed(seed)
            for p in m.parameters():
                nn.init.normal_(p, 0.1, 0.02)
                p.data.uniform_(-0.1, 0.2)
                if p.ndim == 2:
                    nn.init.kaiming_uniform_(p)
                    nn.init.trunc_normal_(p, std=0.02)
        for name, p in compiled.named_parameters():
            close(p, dict(model.named_parameters())[name], name=name)
        compiled.check_replicas()
        close(loss_of(compiled(**sample)), loss_of(model(**sample)))
        wide = next(p for p in compiled.parameters() if p.ndim == 2)
        for draw in (
            torch.randn_like,
            nn.init.orthogonal_,
            lambda p: nn.functional.dropout(p, 0.5),
        ):
            with pytest.raises(autopar.RunError, match="would draw on each of its ranks apart"):
                draw(wide)
        others = dist.tensor.distribute_tensor(
            torch.zeros(8), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        )
        with pytest.warns(UserWarning, match="may not have complete support"):
            others.normal_()  # torch draws the same on one device


@pytest.mark.parametrize(
    "options", [PAIR, dict(parallel=dict(tensor=dict(size=2, mode="1d")))], ids=["zero", "rows"]
)
def test_parameters_are_drawn_as_on_one_device(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_draws, options)


def _draws_in_stages() -> None:
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, parallel=dict(data=2, pipeline=2))
    with pytest.raises(autopar.RunError, match="the ranks of a pipeline hold different parameters"):
        nn.init.normal_(next(iter(compiled.parameters())))


def test_a_pipeline_refuses_to_draw_parameters(ranks: Pools) -> None:
    ranks(4).run(_draws_in_stages)


def _norms(options: dict[str, Any]) -> None:
    with Double():
        model, sample = zoo.llama(dtype=torch.float64)
        compiled = build(model, sample, **options)
        loss_of(compiled(**sample)).backward()
        loss_of(model(**sample)).backward()
    for order in (2.0, 1.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(model.parameters(), 1e9, order)
        close(autopar.clip_grad_norm_(compiled.parameters(), 1e9, order), expected)
        close(nn.utils.clip_grad_norm_(compiled.parameters(), 1e9, order), expected)


@pytest.mark.parametrize("options", [GRID, ZERO], ids=["grid", "zero"])
def test_the_norm_is_torchs(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_norms, options)


# -- accumulation and scaling ----------------------------------------------------------------------


def _accumulates(options: dict[str, Any]) -> None:
    with Double():
        model, sample = zoo.llama(dtype=torch.float64)
        model.model.embed_tokens.requires_grad_(False)  # as in fine-tuning
        compiled = build(model, sample, **options)
        for m in (model, compiled):
            for step, scale in enumerate((1.0, 0.25)):
                (loss_of(m(**batch(sample, step))) * scale).backward()
    mine = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        assert (
            (mine[name].grad is None) == (p.grad is None) == (name == "model.embed_tokens.weight")
        ), name
        if p.grad is not None:
            close(mine[name].grad, p.grad, name=name)


@pytest.mark.parametrize("options", [GRID, ZERO, PARTS], ids=["grid", "zero", "microbatches"])
def test_two_calls_add_up_and_a_scaled_loss_scales(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_accumulates, options)


# -- evaluation ------------------------------------------------------------------------------------


def _evaluates(name: str, options: dict[str, Any]) -> None:
    with Double():
        model, sample = getattr(zoo, name)(dtype=torch.float64, dropout=0.5)
        compiled = build(model, sample, **options)
        loss_of(compiled(**sample)).backward()  # moves BatchNorm's statistics
        plain = copy.deepcopy(model).eval()
        for n, buffer in plain.named_buffers():
            buffer.copy_(full(compiled.get_buffer(n)))
        assert compiled.eval() is compiled
        with torch.no_grad():
            found, expected = compiled(**batch(sample, 1)), plain(**batch(sample, 1))
            again = compiled(**batch(sample, 1))
        close(found["logits"], expected["logits"])
        close(found["loss"], expected["loss"])
        assert not found["loss"].requires_grad
        assert torch.equal(full(found["logits"]), full(again["logits"]))
        for n, buffer in plain.named_buffers():
            assert torch.equal(full(compiled.get_buffer(n)), buffer), f"evaluation changed {n}"
        compiled.train()
        one, two = (full(compiled(**sample)["logits"]) for _ in range(2))
        assert not torch.equal(one, two)


@pytest.mark.parametrize("options", [GRID, ROWS, PARTS], ids=["grid", "rows", "microbatches"])
@pytest.mark.parametrize("name", ["cnn", "bert"])
def test_evaluation_is_the_models(ranks: Pools, name: str, options: dict[str, Any]) -> None:
    ranks(4).run(_evaluates, name, options)


class Averaging(nn.Module):
    """Keeps a running mean of its results in a buffer, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)  # type: ignore[operator]
                self.calls += 1
        return {"loss": y.square().mean(), "logits": y}


def _averages(options: dict[str, Any]) -> None:
    model, sample = (
        Averaging(),
        {"x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))},
    )
    compiled = build(model, sample, **options)
    for training in (True, True, False, True):
        found, expected = compiled.train(training)(**sample), model.train(training)(**sample)
        close(found["logits"], expected["logits"])
        close(compiled.mean, model.mean)
        assert compiled.calls == model.calls


@pytest.mark.parametrize(
    "options", [GRID, ROWS, dict(parallel=dict(data=4))], ids=["grid", "rows", "data"]
)
def test_buffers_change_as_the_models_do(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_averages, options)


# -- checkpoints -----------------------------------------------------------------------------------


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample: dict[str, Any], numbers: range
) -> list[float]:
    losses = []
    for step in numbers:
        loss = loss_of(model(**batch(sample, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _save(options: dict[str, Any], path: str) -> None:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)  # the head is tied to the embedding
        compiled = build(model, sample, **options)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
        _steps(compiled, optimizer, sample, range(2))
        dcp.save(_state(compiled, optimizer), checkpoint_id=path)


def _restored(model: nn.Module, path: str, alone: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path, no_dist=alone)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return optimizer


def _go_on(options: dict[str, Any], path: str) -> list[float]:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        for p in model.parameters():
            p.data.zero_()  # so that all values come from the file
        compiled = build(model, sample, **options)
        optimizer = _restored(compiled, path, alone=False)
        return _steps(compiled, optimizer, sample, range(2, STEPS))


# One process saves on purpose.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_training_goes_on_from_a_checkpoint_elsewhere(ranks: Pools) -> None:
    """A run on a grid of four ranks goes on on one device, on other meshes of four, and on two."""
    with tempfile.TemporaryDirectory() as path, Double():
        ranks(4).run(_save, GRID, path)
        straight, sample = zoo.gpt2(dtype=torch.float64)
        expected = _steps(
            straight, torch.optim.AdamW(straight.parameters(), lr=0.01), sample, range(STEPS)
        )[2:]
        plain, _ = zoo.gpt2(dtype=torch.float64)
        optimizer = _restored(plain, path, alone=True)
        assert _steps(plain, optimizer, sample, range(2, STEPS)) == pytest.approx(
            expected, rel=1e-9
        )
        for world_size, options in ((4, ZERO), (4, ROWS), (2, PAIR)):
            for losses in ranks(world_size).run(_go_on, options, path):
                assert losses == pytest.approx(expected, rel=1e-9)


# -- dropout ---------------------------------------------------------------------------------------

ROWS_OF_DROPS, WIDTH, DROPPED = 8, 1024, 0.5
KEPT = 2.0 / (1 - DROPPED)


class Dropping(nn.Module):
    """Dropout of ones times a weight: outputs and gradient show the dropped elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.drop = nn.Dropout(DROPPED)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.drop(x * self.weight)
        return {"loss": y.sum(), "y": y}


def _drops(
    layout: str, options: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each of three steps the whole output, this rank's shard, and the weight's gradient."""
    model, x = Dropping(), torch.ones(ROWS_OF_DROPS, WIDTH)
    compiled = build(model, {"x": x}, constraints={"drop": layout}, mesh=(2, 2), **options)
    found = []
    for _ in range(3):
        compiled.weight.grad = None
        output = compiled(x=x)
        output["loss"].backward()
        found.append(
            (
                full(output["y"]).detach(),
                output["y"].to_local().detach(),
                full(compiled.weight.grad),
            )
        )
    return found


@pytest.mark.parametrize("layout", ["I I", "S0 I", "S0 S1", "S0 S0"])
def test_dropout_draws_alike_where_replicated_and_apart_where_cut(
    ranks: Pools, layout: str
) -> None:
    everywhere = ranks(4).run(_drops, layout, {})
    wholes = [whole for whole, _, _ in everywhere[0]]
    for steps in everywhere:
        for (whole, _, gradient), expected in zip(steps, wholes, strict=True):
            assert torch.equal(whole, expected)
            close(gradient, whole.sum(0) / 2.0, 1e-6)  # the backward drops the same
    for whole in wholes:
        assert set(whole.unique().tolist()) == {0.0, KEPT}
        assert float((whole == 0).float().mean()) == pytest.approx(
            DROPPED, abs=0.03
        )  # 5 standard deviations
        assert float(whole.mean()) == pytest.approx(2.0, abs=0.12)
        rows = whole != 0
        assert (
            len({tuple(row.tolist()) for row in rows}) == ROWS_OF_DROPS
        )  # no chunk repeats another
        halves = rows.view(ROWS_OF_DROPS, 2, -1)
        assert not torch.equal(halves[:, 0], halves[:, 1])
    assert not torch.equal(wholes[0], wholes[1])
    assert not torch.equal(wholes[1], wholes[2])
    locals_ = [steps[0][1] for steps in everywhere]
    assert len({tuple(x.flatten().tolist()) for x in locals_}) == {"I I": 1, "S0 I": 2}.get(
        layout, 4
    )


def test_dropout_draws_anew_for_each_microbatch(ranks: Pools) -> None:
    for steps in ranks(4).run(_drops, "S0 I", dict(micro_batch_size=2)):
        for whole, _, gradient in steps:
            assert len({tuple(row.tolist()) for row in whole != 0}) == ROWS_OF_DROPS
            close(gradient, whole.sum(0) / 2.0, 1e-6)


def _attends(options: dict[str, Any]) -> list[float]:
    model, sample = zoo.llama(dropout=0.5)
    compiled = build(model, sample, **options)
    return [loss_of(compiled(**sample)).item() for _ in range(3)]


@pytest.mark.parametrize("options", [GRID, ROWS], ids=["grid", "rows"])
def test_attention_drops_differently_at_each_step_and_the_same_on_all_ranks(
    ranks: Pools, options: dict[str, Any]
) -> None:
    everywhere = ranks(4).run(_attends, options)
    assert len(set(everywhere[0])) == 3
    assert all(losses == everywhere[0] for losses in everywhere)
