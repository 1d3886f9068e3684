"""Pipelines of odd models, with shared parameters and outputs of several stages; clipping and
checkpoints.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from equivalence import Double, full, loss_of
from pipeline_cases import DATA, ZERO, build, close, part
from pool import Pools
from staged import Case
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import autopar


class Odd(nn.Module):
    """Integers between stages, a parameter that two stages use, one without a gradient, a boolean
    output, buffers that change.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.table = nn.Embedding(8, 8)
        self.scale = nn.Parameter(torch.rand(8))
        self.idle = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.first(x)) * self.scale
        chosen = h.argmax(-1)
        self.calls += 1
        spare = self.idle(x)
        h = self.second(h).relu()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)  # type: ignore[operator]
        h = self.third(h) + self.table(chosen) * self.scale
        return {
            "loss": h.square().mean(),
            "h": h,
            "positive": h > 0,
            "spare": spare,
            "chosen": chosen,
        }


def _odd(case: Case) -> None:
    model, sample = (
        Odd(),
        {"x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))},
    )
    compiled = build(model, sample, case, starts=["linear_2"])
    found, expected = compiled(**sample), model(**sample)
    found["loss"].backward()
    expected["loss"].backward()
    for name, output in expected.items():
        assert isinstance(found[name], DTensor) == (name != "loss")
        close(full(found[name]).double(), output.double(), name=name)
        assert full(found[name]).dtype == output.dtype
        assert found[name].requires_grad == output.requires_grad, name
    if found["h"].to_local().numel() and compiled.mesh.pipeline_rank == 0:
        assert isinstance(found["h"].placements[0], Partial)
        assert found["h"].to_local().untyped_storage().nbytes() == 8, (
            "an output of another stage takes memory"
        )
    held = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        if name in held:
            assert (held[name].grad is None) == (p.grad is None), name
            if p.grad is not None:
                close(held[name].grad, p.grad, name=name)
    counts = torch.tensor([name in held for name, _ in model.named_parameters()]).int()
    dist.all_reduce(counts)
    # `scale` is on two pipeline ranks; a tensor that no stage uses is on one.
    meshes = compiled.mesh.size
    assert dict(zip(dict(model.named_parameters()), counts.tolist(), strict=True)) == {
        name: meshes * (2 if name == "scale" else 1) for name, _ in model.named_parameters()
    }
    for name, b in compiled.named_buffers():
        if name == "calls":
            assert b == 1, "a step changes it once, in whatever microbatches"
        else:
            close(b, model.get_buffer(name), name=name)


@pytest.mark.parametrize(
    "case",
    [Case(2, "gpipe"), Case(2, "1f1b", options=part(4)), Case(2, "zero-bubble", options=part(4))],
    ids=str,
)
def test_odd_models(ranks: Pools, case: Case) -> None:
    ranks(2).run(_odd, case)


def test_odd_models_with_split_stages(ranks: Pools) -> None:
    ranks(4).run(_odd, Case(2, "1f1b", options=part(2, **DATA)))


def _tied_norm() -> None:
    """The norm counts a parameter of two stages once, and a rank without parameters takes part."""
    model, sample = (
        Odd(),
        {"x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))},
    )
    compiled = build(model, sample, Case(2, "gpipe"), starts=["linear_2"])
    for m in (model, compiled):
        m(**sample)["loss"].backward()
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))  # the user's own, on all ranks
    other.grad = torch.full_like(other, 0.1)
    for names in (None, ("scale",), ("third.weight",)):
        chosen = [p for n, p in model.named_parameters() if names is None or n in names]
        mine = [p for n, p in compiled.named_parameters() if names is None or n in names]
        for order, more in ((2.0, []), (float("inf"), []), (2.0, [] if names else [other])):
            expected = nn.utils.clip_grad_norm_([*chosen, *more], 1e9, order)
            close(autopar.clip_grad_norm_([*mine, *more], 1e9, order), expected)
            close(nn.utils.clip_grad_norm_([*mine, *more], 1e9, order), expected)


def test_the_norm_is_of_all_stages(ranks: Pools) -> None:
    ranks(2).run(_tied_norm)


def _clips(case: Case) -> None:
    gc.collect()  # programs of earlier tests
    clip_early, norm_early = nn.utils.clip_grad_norm_, nn.utils.get_total_norm
    model, sample = zoo.mlp(dtype=torch.float64)
    _pipelined_clipping(model, sample, case, clip_early)
    gc.collect()
    assert nn.utils.get_total_norm is norm_early


def _pipelined_clipping(model: nn.Module, sample: Any, case: Case, clip: Any) -> None:
    compiled = build(model, sample, case)
    for m in (model, compiled):
        loss_of(m(**sample)).backward()
    parameters = list(compiled.parameters())
    for p in parameters:
        assert p.grad is not None
        p.grad = p.grad * 1.0  # a gradient of the user's own
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    close(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]), expected)
    most = float(expected) / 2
    close(clip(parameters, most), clip(model.parameters(), most))
    mine = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        if name in mine:
            close(mine[name].grad, p.grad)
    if parameters:
        with torch.no_grad():
            parameters[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"of order 2\.0 of the gradients is nan"):
        clip(parameters, 1.0, error_if_nonfinite=True)


def test_torchs_clipping_is_by_the_norm_of_all_stages(ranks: Pools) -> None:
    ranks(2).run(_clips, Case(2, "gpipe"))
    ranks(4).run(_clips, Case(2, "gpipe", options=DATA))


def _save(case: Case, path: str) -> None:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        compiled = build(model, sample, case)
        assert list(compiled.state_dict()) == [
            n for n in model.state_dict() if n in compiled.state_dict()
        ]
        dcp.save({"model": compiled.state_dict()}, checkpoint_id=path)
        for p in model.parameters():
            p.data.mul_(2)
        compiled.load_state_dict(model.state_dict())  # tensors of all stages
        for name, p in compiled.named_parameters():
            close(p, model.get_parameter(name))
        with pytest.raises(RuntimeError, match="nonsense"):
            compiled.load_state_dict({**model.state_dict(), "nonsense": torch.zeros(1)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_is_the_whole_models(ranks: Pools) -> None:
    for world_size, case in ((2, Case(2, "gpipe")), (4, Case(2, "zero-bubble", options=ZERO))):
        with tempfile.TemporaryDirectory() as path:
            ranks(world_size).run(_save, case, path)
            model, _ = zoo.gpt2(dtype=torch.float64)
            state = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
            dcp.load({"model": state}, checkpoint_id=path, no_dist=True)
            for name, x in model.state_dict().items():
                assert torch.equal(state[name], x), name
