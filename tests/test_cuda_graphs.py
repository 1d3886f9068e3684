"""Compiled programs as CUDA graphs: what is refused, and on a GPU, that they compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import equivalence
import pytest
import torch
import zoo
from test_gpu import compiled_on_gpu, train

import autopar
from autopar.runtime.compilation.cuda_graphs import CudaGraphs, check_cuda_graphs


def on_gpu(test: Any) -> Any:
    """A test that needs a GPU."""
    test = pytest.mark.filterwarnings("ignore")(test)  # torch's compiler has its own
    test = pytest.mark.timeout(240)(test)
    return pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test)


def recorded(call: Callable[..., Any], _: Sequence[torch.Tensor], **__: Any) -> Callable[..., Any]:
    """Stands for ``torch.cuda.make_graphed_callables``: results and gradients in memory that each
    replay overwrites.
    """
    kept: dict[int, torch.Tensor] = {}

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.enable_grad():
                ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in arguments]
                ctx.results = call(*ctx.leaves)
            return tuple(_kept(kept, i, x.detach()) for i, x in enumerate(ctx.results))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
            roots = [(x, g) for x, g in zip(ctx.results, gradients, strict=True) if x.requires_grad]
            wanted = [x for x in ctx.leaves if x.requires_grad]
            xs, gs = zip(*roots, strict=True)
            found = iter(torch.autograd.grad(xs, wanted, gs, retain_graph=True, allow_unused=True))
            each = [next(found) if x.requires_grad else None for x in ctx.leaves]
            return tuple(None if g is None else _kept(kept, 100 + i, g) for i, g in enumerate(each))

    return Replayed.apply


def _kept(kept: dict[int, torch.Tensor], place: int, x: torch.Tensor) -> torch.Tensor:
    kept.setdefault(place, torch.empty_like(x)).copy_(x)
    return kept[place].detach()


def test_results_and_gradients_outlast_the_next_replay() -> None:
    def call(w: torch.Tensor, unused: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return y.square().sum(), y.detach()

    w, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    x, other = torch.randn(4, 3), torch.randn(4, 3)
    with mock.patch("torch.cuda.make_graphed_callables", recorded):
        graphs = CudaGraphs(call, {0: True, 1: True}, (0,))
        loss, y = graphs(w, unused, x)
        assert loss.requires_grad
        assert not y.requires_grad
        loss.backward(retain_graph=True)
        loss.backward()
        first, before = w.grad.clone(), y.clone()
        again, _ = graphs(w, unused, other)
        again.backward()
        assert torch.equal(y, before)
        assert unused.grad is None
        expected = 2 * x.T @ (x @ w), 2 * other.T @ (other @ w)
        assert torch.allclose(first, 2 * expected[0], rtol=1e-5)
        assert torch.allclose(w.grad, 2 * expected[0] + expected[1], rtol=1e-5)
        stale, _ = graphs(w, unused, x)
        graphs(w, unused, x)
        with pytest.raises(autopar.RunError, match="the backward of call 3 came after call 4"):
            stale.backward()
        changed, _ = graphs(w, unused, x)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(autopar.RunError, match="changed in place"):
            changed.backward()


def test_only_what_lasts_is_recorded_where_it_lies() -> None:
    """Copies of parameters in another dtype lie elsewhere in each step."""

    def call(w: torch.Tensor, cast: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (((x @ w) * cast).sum(),)

    w, cast = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    with mock.patch("torch.cuda.make_graphed_callables", side_effect=recorded) as recordings:
        graphs = CudaGraphs(call, {0: True}, (0,))
        for number in range(3):
            x = torch.randn(3, 6)[:, ::2]  # with gaps
            kept, leaf = x.clone(), cast.detach().clone().requires_grad_()
            graphs(w, leaf, x)[0].backward()
            assert torch.allclose(leaf.grad, x @ w, rtol=1e-5), number
            assert torch.equal(x, kept)
        assert recordings.call_count == 1
        w.data = w.data * 2
        w.grad = None
        loss = graphs(w, leaf, x)[0]
        loss.backward()
        assert recordings.call_count == 2
        assert loss.item() == pytest.approx(((x @ w) * leaf).sum().item(), rel=1e-5)
        assert torch.allclose(w.grad, x.T @ leaf, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("cnn", dict(micro_batch_size=4)), ("mlp", dict(precision="bf16"))],
    ids=str,
)
def test_a_program_on_the_stand_in_trains_as_without(name: str, options: dict[str, Any]) -> None:
    made = getattr(zoo, name)()
    asked = dict(cluster="cpu", backend="inductor", progress=False) | options
    with (
        mock.patch("autopar.api.check_cuda_graphs"),
        mock.patch("torch.cuda.make_graphed_callables", side_effect=recorded) as recordings,
    ):
        plain, graphed = (
            autopar.compile(copy.deepcopy(made[0]), made[1], 1, cuda_graphs=on, **asked)
            for on in (False, True)
        )
        expected, _ = train(plain, made[1])
        found, _ = train(graphed, made[1])
        assert recordings.call_count == 1
    assert found == expected
    for one, other in zip(plain.state_dict().values(), graphed.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2, "cuda"), "world_size=2: CUDA graphs are for one GPU"),
        ((1, "cpu"), "the model is on cpu"),
        ((1, "cuda", "eager"), 'the plan has backend="eager"'),
        ((1, "cuda", "inductor", True), "the model has dropout"),
    ],
)
def test_what_has_no_cuda_graphs_is_refused(given: Any, message: str) -> None:
    with pytest.raises(autopar.RunError, match=message):
        check_cuda_graphs(*given)


def test_a_model_on_the_cpu_has_none() -> None:
    with pytest.raises(autopar.RunError, match="the model is on cpu: move it to a GPU"):
        autopar.compile(*zoo.mlp(), 1, progress=False, cuda_graphs=True)


GRAPHS = dict(backend="inductor", cuda_graphs=True)


@on_gpu
@pytest.mark.parametrize("name", ["gpt2", "cnn", "mlp"])
@pytest.mark.parametrize("options", [{}, dict(micro_batch_size=2), dict(precision="bf16")], ids=str)
def test_cuda_graphs_change_nothing(name: str, options: dict[str, Any]) -> None:
    made = getattr(zoo, name)()
    sample = zoo.on("cuda", made)[1]
    plain, graphed = (
        compiled_on_gpu(copy.deepcopy(made), **(GRAPHS | dict(cuda_graphs=on)), **options)
        for on in (False, True)
    )
    expected, _ = train(plain, sample)
    found, _ = train(graphed, {k: v.clone() for k, v in sample.items()})
    assert found == pytest.approx(expected, rel=2e-2 if "precision" in options else 1e-5)
    for (label, one), other in zip(plain.named_buffers(), graphed.buffers(), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=1e-3), label
    # Another batch, in other memory, and gradients that are added up over two calls.
    other = {k: v.flip(0) for k, v in sample.items()}
    kept = {k: v.clone() for k, v in sample.items()}
    for program in (plain, graphed):
        for batch in (sample, other):
            equivalence.loss_of(program(**batch)).backward()
    assert all(torch.equal(sample[k], kept[k]) for k in kept)
    tolerance = 5e-2 if "precision" in options else 1e-3
    for (label, one), two in zip(plain.named_parameters(), graphed.parameters(), strict=True):
        if one.grad is None or two.grad is None:
            assert one.grad is two.grad is None, label
            continue
        scale = one.grad.abs().max().item()
        assert (one.grad - two.grad).abs().max().item() <= tolerance * scale + 1e-7, label


@on_gpu
def test_cuda_graphs_raise_where_they_would_be_wrong() -> None:
    made = zoo.mlp()
    sample = zoo.on("cuda", made)[1]
    program = compiled_on_gpu(copy.deepcopy(made), **GRAPHS)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    first = equivalence.loss_of(program(**sample))
    second = equivalence.loss_of(program(**sample))
    with pytest.raises(autopar.RunError, match="the backward of call 1 came after call 2"):
        first.backward()
    second.backward(retain_graph=True)
    once = [p.grad.clone() for p in program.parameters()]
    second.backward(retain_graph=True)
    for p, g in zip(program.parameters(), once, strict=True):
        assert torch.allclose(p.grad, 2 * g, rtol=1e-5)
    optimizer.step()
    with pytest.raises(autopar.RunError, match="changed in place"):
        second.backward()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        pytest.raises(autopar.RunError, match="saved_tensors_hooks"),
    ):
        program(**sample)
    # A parameter that lies elsewhere, and one that is frozen.
    plain = compiled_on_gpu(copy.deepcopy(made), backend="inductor")
    plain.load_state_dict(program.state_dict())
    for parameter in program.parameters():
        parameter.data = parameter.data.clone()
    for each in (program, plain):
        next(each.parameters()).requires_grad_(False)
    assert train(program, sample)[0] == pytest.approx(train(plain, sample)[0], rel=1e-5)
    twin = copy.deepcopy(program)
    with torch.no_grad():
        losses = [equivalence.loss_of(p.eval()(**sample)).item() for p in (program, twin)]
    assert losses[0] == losses[1]
    with pytest.raises(autopar.RunError, match="has dropout"):
        compiled_on_gpu(zoo.gpt2(dropout=0.1), **GRAPHS)
    with pytest.raises(autopar.RunError, match='the plan has backend="eager"'):
        compiled_on_gpu(zoo.mlp(), backend="eager", cuda_graphs=True)
