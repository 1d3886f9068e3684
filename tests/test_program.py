"""The compiled module as a user sees it: names, calls, outputs, checkpoints, errors."""

from __future__ import annotations

from typing import Any

import handmade
import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import RunError
from autopar.ir.layout import R
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.step.loss import PendingLoss, sum_loss

WORLD = {"one": 1, "data": 2, "zero": 2, "columns": 2, "slice": 2, "grid": 4, "data4": 4}


def _names(case: str) -> None:
    model, compiled = handmade.Network(), handmade.build(case)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in compiled.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert compiled.again.weight is compiled.fc1.weight
    assert isinstance(compiled.norm, torch.nn.LayerNorm)
    for name, p in compiled.named_parameters():
        assert isinstance(p, DTensor) == (WORLD[case] > 1), name
        assert torch.equal(handmade.full(p), model.get_parameter(name)), name
    assert type(compiled.calls) is torch.Tensor


@pytest.mark.parametrize("case", ["one", "grid"])
def test_names_and_values_are_the_models(ranks: Pools, case: str) -> None:
    ranks(WORLD[case]).run(_names, case)


def _outputs(case: str, microbatches: int, whole: bool) -> None:
    model, compiled = handmade.Network(), handmade.build(case, microbatches, whole=whole)
    batch = handmade.batch()
    for mode, grad in ((True, True), (False, False), (False, True)):
        model.train(mode), compiled.train(mode)
        with torch.set_grad_enabled(grad):
            expected, found = model(**batch), compiled(**batch)
        assert list(found) == list(expected)
        assert found["loss"].requires_grad == grad
        assert type(found["loss"]) is torch.Tensor
        for name in expected:
            torch.testing.assert_close(
                handmade.full(found[name]), expected[name], rtol=1e-12, atol=1e-14
            )
    assert found["logits"].placements == (
        Shard(0) if case == "zero" and not whole else Replicate(),
    )
    assert compiled.calls == 3
    assert all(p.grad is None for p in compiled.parameters())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("case", "whole"), [("one", False), ("zero", False), ("zero", True)])
def test_outputs_in_every_mode(ranks: Pools, case: str, microbatches: int, whole: bool) -> None:
    ranks(WORLD[case]).run(_outputs, case, microbatches, whole)


def _prologue(microbatches: int) -> None:
    compiled = handmade.build("data", microbatches, hoisted=(R,))

    def count(
        mesh: Any,
        w1: Any,
        b1: Any,
        w2: Any,
        b2: Any,
        idle: Any,
        calls: Any,
        scale: Any,
        x: Any,
        y: Any,
    ) -> tuple:
        return ((y > 0).sum(),)

    def program(
        mesh: Any,
        w1: Any,
        b1: Any,
        w2: Any,
        b2: Any,
        idle: Any,
        calls: Any,
        scale: Any,
        x: Any,
        y: Any,
        n: Any,
    ) -> tuple:
        x = handmade.redistribute(x, mesh, 0, "I", "S0")
        return handmade.redistribute((x @ w1.t()).sum() / n, mesh, 0, "P", "I"), x, x, calls

    compiled._lowered.prologue = torch.fx.symbolic_trace(count)
    compiled._lowered.train = torch.fx.symbolic_trace(program)
    batch = handmade.batch()
    expected = (batch["x"] @ handmade.Network().fc1.weight.t()).sum() / (batch["y"] > 0).sum()
    torch.testing.assert_close(compiled(**batch)["loss"], expected)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_prologue_counts_over_the_whole_batch(ranks: Pools, microbatches: int) -> None:
    ranks(2).run(_prologue, microbatches)


def _errors() -> None:
    compiled, batch = handmade.build("data", 2), handmade.batch()
    x, y = batch["x"], batch["y"]
    for arguments, message in [
        ({"x": x[:6], "y": y}, r"x has size 6 in dim 0, expected 8 .*drop_last=True"),
        ({"x": x[0], "y": y}, r"x has 1 dims \(6,\), the sample had 2: \(8, 6\)"),
        ({"x": x.float(), "y": y}, r"x is torch.float32, the sample had torch.float64"),
        ({"x": x.to("meta"), "y": y}, r"x is on meta, this rank's program runs on cpu"),
        ({"x": x}, "missing y: the sample had x, y"),
        ({"x": x, "y": y, "z": y}, "got an argument 'z', the sample had x, y"),
        ({"x": 3, "y": y}, r"x is 3, the sample had a tensor of shape \(8, 6\)"),
        ({"x": [x], "y": y}, "x is "),
    ]:
        with pytest.raises(RunError, match=message):
            compiled(**arguments)
    with pytest.raises(RunError, match="got 1 positional arguments, the sample had 0"):
        compiled(x, y=y)
    loss = compiled(y=y, x=x)["loss"]  # a call after an error works, with keywords in any order
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RunError, match="backpropagated twice"):
        loss.backward()
    with pytest.raises(RunError, match=r"stays torch.float64 on cpu, asked for torch.float32"):
        compiled.float()
    assert compiled.to("cpu") is compiled
    with pytest.raises(
        RunError, match="the plan is not the same on all ranks: rank 1 of 2 differ from rank 0"
    ):
        check_same_on_all_ranks(f"{dist.get_rank()}", "the plan")
    check_same_on_all_ranks("one", "the plan")


def test_errors_name_what_is_wrong(ranks: Pools) -> None:
    ranks(2).run(_errors)


def _odd_plans() -> None:
    handmade.CASES["odd"] = ((2,), (), None, {"fc1.weight": ("I", "S0")})
    with pytest.raises(
        RunError, match=r"parameter fc1.weight: stored as I it cannot be used as S0 \(axis 'a'\)"
    ):
        handmade.build("odd")
    handmade.CASES["odd"] = (
        (2,),
        (),
        0,
        {"fc1.weight": ("S0", "S0"), "fc1.bias": ("S0", "S0"), "scale": ("I", "S0")},
    )
    compiled = handmade.build("odd")
    assert compiled._state.graph_argument("scale").shape == (handmade.OUT // 2,)
    compiled.scale.fill_(3.0)  # a buffer's slice is a view
    assert (compiled._state.graph_argument("scale") == 3).all()


def test_layouts_of_state(ranks: Pools) -> None:
    ranks(2).run(_odd_plans)


def _print(capsys: pytest.CaptureFixture[str] | None = None) -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        handmade.build("data").print_program()
    return text.getvalue()


def test_print_program(ranks: Pools) -> None:
    (text, _) = ranks(2).run(_print)
    assert "redistribute(x, mesh, 0, 'I', 'S0')" in text


def _mesh_without_axes() -> None:
    assert Mesh((), (), device="cpu").size == 1


def test_mesh_without_axes(ranks: Pools) -> None:
    ranks(1).run(_mesh_without_axes)


def _logged_loss() -> tuple[float, float]:
    share = torch.tensor(dist.get_rank() + 1.0, requires_grad=True)
    loss = sum_loss(share, dist.group.WORLD)
    logged = loss.detach()
    assert isinstance(logged, PendingLoss)
    assert logged.pending is not None  # nobody has waited
    assert not logged.requires_grad
    loss.backward()
    assert share.grad is not None
    assert loss.item() == float(logged) == float(2 * logged) / 2
    return loss.item(), share.grad.item()


def test_a_detached_loss_may_still_be_on_its_way(ranks: Pools) -> None:
    assert ranks(2).run(_logged_loss) == [(3.0, 1.0)] * 2
