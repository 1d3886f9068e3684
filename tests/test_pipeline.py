"""Pipelined programs on torch's schedules: what they compute, and the loop that users write."""

from __future__ import annotations

import copy
import gc
import tempfile
import warnings
import weakref
from typing import Any

import pytest
import staged
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from equivalence import Double, differences, full, loss_of, step, step_in_parts, worst
from pool import Pools
from staged import Case
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.errors import PlanError, RunError

TOLERANCE = 1e-9
TENSOR = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
DATA = dict(parallel=dict(data=2), zero=0)
ZERO = dict(parallel=dict(data=2), zero=2)
GRID = dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")))
RUNS = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2)]


def _part(size: int, **options: Any) -> dict[str, Any]:
    return dict(micro_batch_size=size, **options)


# -- equivalence -----------------------------------------------------------------------------------

TWO = [Case(2, schedule, chunks, options=_part(2)) for schedule, chunks in RUNS]
FOUR = [
    Case(2, "1f1b", options=_part(2, **DATA)),
    Case(2, "zero-bubble", 2, options=_part(2, **TENSOR)),
    Case(4, "1f1b", options=_part(2)),
]
MORE = [
    *(Case(2, schedule, chunks, 16, _part(4, **ZERO)) for schedule, chunks in RUNS),
    *(Case(2, schedule, chunks, 16, _part(4, **TENSOR)) for schedule, chunks in RUNS),
    *(Case(4, schedule, chunks, 16, _part(2)) for schedule, chunks in RUNS),
]
EIGHT = [
    *(Case(2, schedule, chunks, 16, _part(2, **GRID)) for schedule, chunks in RUNS),
    *(Case(4, schedule, chunks, 16, _part(2, **DATA)) for schedule, chunks in RUNS),
    Case(4, "interleaved-1f1b", 2, 16, _part(2, **TENSOR)),
    Case(8, "gpipe", 1, 16, _part(4)),
    Case(8, "1f1b", 1, 16, _part(2)),
]
MODELS = ("gpt2", "llama", "t5", "vit", "unet")
ON_FOUR = ("gpt2", "unet")  # on four ranks in tests that are not slow


def _equal(ranks: Pools, world_size: int, name: str, cases: list[Case]) -> None:
    everywhere = ranks(world_size).run(staged.check, name, cases, timeout=600)
    model, _ = getattr(zoo, name)()
    for i, case in enumerate(cases):
        for (error, what), _, _ in (found[i] for found in everywhere):
            assert error < TOLERANCE, (case, what, error)
        held = [names for found in everywhere for names in [found[i][2]]]
        assert {n for names in held for n in names} == {n for n, _ in model.named_parameters()}
        assert all(len(names) < len(list(model.parameters())) for names in held)


def test_two_ranks_equal_one_device(ranks: Pools) -> None:
    _equal(ranks, 2, "gpt2", TWO)  # other models are below, with other numbers of microbatches


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one_device(ranks: Pools, name: str) -> None:
    _equal(ranks, 4, name, FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_more_on_four_ranks_equals_one_device(ranks: Pools, name: str) -> None:
    _equal(ranks, 4, name, MORE if name in ON_FOUR else [*FOUR, *MORE])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_eight_ranks_equal_one_device(ranks: Pools, name: str) -> None:
    _equal(ranks, 8, name, EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_microbatches(ranks: Pools, name: str) -> None:
    sizes = {m: dict(batch=2 * m, options=_part(2)) for m in range(1, 9)}
    cases = [Case(2, "gpipe", **size) for size in sizes.values()] + [
        Case(2, "zero-bubble", **sizes[4])
    ]
    cases += [Case(2, "1f1b", **sizes[m]) for m in range(2, 9)]
    cases += [
        Case(2, schedule, 2, **sizes[m])
        for schedule in ("interleaved-1f1b", "zero-bubble")
        for m in (1, 2, 3, 4, 6, 8)
    ]
    _equal(ranks, 2, name, cases)


# -- the loop --------------------------------------------------------------------------------------


def build(model: nn.Module, sample: Any, case: Case, **more: Any) -> autopar.Compiled:
    """``model`` compiled for all ranks of the test."""
    _clear_sharding_prop_cache()
    world = dist.get_world_size()
    plan = staged.staged_plan(
        model,
        sample,
        world,
        case.pipeline,
        case.schedule,
        chunks=case.chunks,
        **case.options,
        **more,
    )
    return autopar.compile(copy.deepcopy(model), sample, world, plan=plan)


def close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE, name: str = ""
) -> None:
    expected = full(expected).detach()
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(
        full(found).detach(), expected, rtol=tolerance, atol=atol, msg=lambda m: f"{name}: {m}"
    )


def batch(sample: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: x.roll(number, 0) for name, x in sample.items()}


def _trains(case: Case) -> None:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        compiled = build(model, sample, case)
        histories = []
        for m, clip in ((compiled, autopar.clip_grad_norm_), (model, nn.utils.clip_grad_norm_)):
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
            history = []
            for number, order in enumerate((2.0, 1.0, float("inf"))):
                loss = loss_of(m(**batch(sample, number)))
                (loss * 3).backward()
                loss_of(m(**batch(sample, number + 1))).backward()  # accumulates
                norm = clip(m.parameters(), 0.05, order)
                optimizer.step()
                optimizer.zero_grad()
                history.append((loss.item(), norm.item()))
            histories.append(torch.tensor(history))
    close(*histories)
    mine = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        if name in mine:
            close(mine[name], p, 1e-7, name)
    # The tied embedding is on the first and the last stage, with equal values.
    (tied,) = [
        full(p).detach() for name, p in mine.items() if name == "transformer.wte.weight"
    ] or [None]
    if tied is not None:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, tied)
        assert all(torch.equal(tied, other) for other in everywhere)


@pytest.mark.parametrize(
    "case",
    [Case(2, "1f1b", options=_part(2)), Case(2, "zero-bubble", 2, options=_part(4))],
    ids=str,
)
def test_training_equals_one_device(ranks: Pools, case: Case) -> None:
    ranks(2).run(_trains, case)


def test_training_with_split_stages_equals_one_device(ranks: Pools) -> None:
    ranks(4).run(_trains, Case(2, "interleaved-1f1b", 2, options=_part(2, **ZERO)))


def _evaluates(case: Case) -> None:
    with Double():
        model, sample = zoo.cnn(dtype=torch.float64, dropout=0.5)
        compiled = build(model, sample, case)
        loss_of(compiled(**sample)).backward()  # moves BatchNorm's statistics
        merged: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(merged, {n: full(b) for n, b in compiled.named_buffers()})
        plain = copy.deepcopy(model).eval()
        plain.load_state_dict({n: b for part in merged for n, b in part.items()}, strict=False)
        assert all(b.sum() != 0 for n, b in plain.named_buffers())
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found, expected = compiled.eval()(**batch(sample, 1)), plain(**batch(sample, 1))
            close(found["logits"], expected["logits"])
            close(found["loss"], expected["loss"])
            assert found["loss"].requires_grad == grad
        for n, b in compiled.named_buffers():
            assert torch.equal(b, plain.get_buffer(n)), f"evaluation changed {n}"
        compiled.train()
        one, two = (full(compiled(**sample)["logits"]) for _ in range(2))
        assert not torch.equal(one, two)
        with torch.no_grad():
            assert not compiled(**sample)["loss"].requires_grad


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"])
def test_evaluation_is_the_models(ranks: Pools, schedule: str) -> None:
    ranks(2).run(
        _evaluates, Case(2, schedule, 2 if schedule == "interleaved-1f1b" else 1, options=_part(2))
    )


def _normalises(case: Case) -> None:
    model, sample = zoo.cnn(dtype=torch.float64)
    compiled = build(model, sample, case)
    found = step(compiled, sample)
    expected = step_in_parts(
        copy.deepcopy(model), sample, compiled.plan.microbatches, compiled.plan.data_degree
    )
    error, what = worst(differences(found, staged.own(expected, found)))
    assert error < TOLERANCE, what


def test_batch_norm_takes_each_microbatchs_statistics(ranks: Pools) -> None:
    ranks(2).run(_normalises, Case(2, "1f1b", options=_part(2)))


# -- what is odd -----------------------------------------------------------------------------------


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
    [Case(2, "gpipe"), Case(2, "1f1b", options=_part(4)), Case(2, "zero-bubble", options=_part(4))],
    ids=str,
)
def test_odd_models(ranks: Pools, case: Case) -> None:
    ranks(2).run(_odd, case)


def test_odd_models_with_split_stages(ranks: Pools) -> None:
    ranks(4).run(_odd, Case(2, "1f1b", options=_part(2, **DATA)))


def _tied_norm() -> None:
    """The norm counts a parameter of two stages once, and a rank without parameters takes part."""
    model, sample = (
        Odd(),
        {"x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))},
    )
    compiled = build(model, sample, Case(2, "gpipe"), starts=["linear_2"])
    for m in (model, compiled):
        m(**sample)["loss"].backward()
    for names in (None, ("scale",), ("third.weight",)):
        chosen = [p for n, p in model.named_parameters() if names is None or n in names]
        mine = [p for n, p in compiled.named_parameters() if names is None or n in names]
        for order in (2.0, float("inf")):
            close(
                autopar.clip_grad_norm_(mine, 1e9, order),
                nn.utils.clip_grad_norm_(chosen, 1e9, order),
            )


def test_the_norm_is_of_all_stages(ranks: Pools) -> None:
    ranks(2).run(_tied_norm)


def _warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def _warns(case: Case) -> None:
    gc.collect()  # programs of earlier tests
    clip_early, norm_early = nn.utils.clip_grad_norm_, nn.utils.get_total_norm
    model, sample = zoo.mlp(dtype=torch.float64)
    _pipelined_clipping(model, sample, case, clip_early)
    gc.collect()
    assert nn.utils.get_total_norm is norm_early


def _pipelined_clipping(model: nn.Module, sample: Any, case: Case, clip: Any) -> None:
    compiled = build(model, sample, case)
    loss_of(compiled(**sample)).backward()
    parameters = list(compiled.parameters())
    (message,) = _warned(lambda: clip(parameters, 1.0))
    assert "autopar.clip_grad_norm_" in message
    assert _warned(lambda: nn.utils.get_total_norm([p.grad for p in parameters]))
    assert not _warned(lambda: autopar.clip_grad_norm_(parameters, 1.0))
    loss_of(model(**sample)).backward()
    assert not _warned(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_torchs_clipping_warns(ranks: Pools) -> None:
    ranks(2).run(_warns, Case(2, "gpipe"))
    ranks(4).run(_warns, Case(2, "gpipe", options=DATA))


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


# -- memory ----------------------------------------------------------------------------------------


class _Tag:
    """An object that lives as long as the graph that refers to it."""


def _held(case: Case) -> list[list[int]]:
    """For each stage of this rank the number of microbatches with a graph, after each forward."""
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64, batch=case.batch)
        compiled = build(model, sample, case)
    assert compiled._runner.stages is not None
    compute = compiled._runner._work.compute
    programs = compiled._runner.stages.programs([stage.train for stage in compiled._lowered.stages])
    stage_of = {id(program): i for i, program in enumerate(programs)}
    tags: list[list[weakref.ref[_Tag]]] = [[] for _ in stage_of]
    counts: list[list[int]] = [[] for _ in stage_of]

    def watched(program: nn.Module, arguments: Any) -> Any:
        flat = compute(program, arguments)
        tag, i = _Tag(), stage_of[id(program)]
        next(x for x in flat if x.requires_grad).grad_fn.metadata["tag"] = tag
        tags[i].append(weakref.ref(tag))
        del tag
        counts[i].append(sum(t() is not None for t in tags[i]))
        return flat

    compiled._runner._work.compute = watched  # type: ignore[method-assign]
    with Double():
        compiled(**sample)
    assert all(t() is None for held in tags for t in held)
    return counts


@pytest.mark.slow
def test_a_stage_holds_as_many_microbatches_as_its_schedule_says(ranks: Pools) -> None:
    assert [
        max(c) for (c,) in ranks(4).run(_held, Case(4, "1f1b", batch=12, options=_part(2)))
    ] == [4, 3, 2, 1]
    assert [max(c) for (c,) in ranks(2).run(_held, Case(2, "gpipe", options=_part(2)))] == [4, 4]


# -- errors ----------------------------------------------------------------------------------------


def _errors() -> None:
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, Case(2, "1f1b", options=_part(2)))
        with pytest.raises(RunError, match="size 4 in dim 0, expected 8"):
            compiled(**{name: x[:4] for name, x in sample.items()})
        loss = loss_of(compiled(**sample))
        loss.backward()
        with pytest.raises(RunError, match="twice"):
            loss.backward()
        with pytest.raises(PlanError, match="needs at least 2 microbatches, there are 1"):
            build(model, sample, Case(2, "1f1b"))
        captured = (
            autopar.frontend.traced_model.TracedModel(model, sample, None).analyse(1)[0].captured
        )
        last = [n.name for n in captured.graph.nodes if n.op == "call_function"][-1]
        with pytest.raises(PlanError, match="rank 1 of 2 would have no parameter"):
            build(model, sample, Case(2, "gpipe"), starts=[last])


def test_errors(ranks: Pools) -> None:
    ranks(2).run(_errors)


def _fails() -> None:
    """An error in the last backward of the first stage. No other rank waits for this backward."""
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, Case(2, "gpipe", options=_part(2)))
        first = compiled.mesh.pipeline_rank == 0
        assert compiled._runner.stages is not None

        def failing(index: int) -> None:
            raise ValueError("no memory")

        if not first:
            assert loss_of(compiled(**sample)).item() > 0
            return
        compiled._runner.stages._schedule_runner._on_last_backward = failing
        with pytest.raises(ValueError, match="no memory"):
            compiled(**sample)
        assert all(w.leaf.grad is None for w in compiled._runner.weights)
        assert all(p.grad is None for p in compiled.parameters())
        dist.all_reduce(
            torch.zeros((), dtype=torch.float64), group=compiled.mesh.pipeline_group()
        )  # the loss's sum, in which the other rank waits
        with pytest.raises(RunError, match="an earlier step failed"):
            compiled(**sample)


def test_a_failed_step_leaves_nothing(ranks: Pools) -> None:
    ranks(2).run(_fails)
