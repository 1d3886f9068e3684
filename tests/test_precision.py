"""Mixed precision, compared with the plain model on one device and casts by hand: of parameters and
inputs before it, of gradients after it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from casts_by_hand import FOUR, NAMES, PAIR, SHORT, build, by_hand, distance, planned
from equivalence import (
    TOLERANCE,
    Double,
    differences,
    loss_of,
    own,
    step,
    traced_once,
    vanishing,
    worst,
)
from pool import Pools


def some_of(names: list[str], slow: list[str]) -> list[Any]:
    """Models as parameters of slow tests; those not in ``slow``, of exhaustive tests."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.exhaustive)
        for name in names
    ]


def _exact(name: str, configurations: dict[str, dict[str, Any]]) -> dict[str, tuple[float, str]]:
    model, sample = getattr(zoo, name)(dtype=torch.float64)
    with Double():
        vanishes = vanishing(step(copy.deepcopy(model), sample))
    expected = by_hand(model, sample, torch.float32)
    found: dict[str, tuple[float, str]] = {}
    with traced_once():
        plans = planned(model, sample, configurations, "fp32")
        for label, plan in plans.items():
            try:
                compiled = build(model, sample, plan=plan)
                mine = step(compiled, sample)
                assert {p.dtype for p in compiled.parameters()} == {torch.float64}
                assert {g.dtype for g in mine.gradients.values() if g is not None} == {
                    torch.float64
                }
                found[label] = worst(differences(mine, own(expected, mine), vanishes))
            except Exception as e:
                raise AssertionError(f"{name}, {label}: {e}") from e
    return found


def check_exact(everywhere: list[dict[str, tuple[float, str]]]) -> None:
    errors = {label: max(found[label] for found in everywhere) for label in everywhere[0]}
    assert all(e < TOLERANCE[torch.float32] for e, _ in errors.values()), errors


@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp"])
def test_float64_parameters_and_float32_compute_on_one_rank(ranks: Pools, name: str) -> None:
    check_exact(ranks(1).run(_exact, name, {"alone": {}, "microbatches": dict(micro_batch_size=4)}))


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize(
    "name", some_of(["gpt2", "llama", "mlp", "bert", "t5"], slow=["gpt2", "mlp"])
)
def test_more_models_on_two_ranks(ranks: Pools, name: str) -> None:
    check_exact(ranks(2).run(_exact, name, PAIR, timeout=400))


@pytest.mark.parametrize("name", some_of(["gpt2", "llama"], slow=["llama"]))
def test_float64_parameters_and_float32_compute_on_four_ranks(ranks: Pools, name: str) -> None:
    check_exact(ranks(4).run(_exact, name, FOUR, timeout=400))


# -- half precision: no worse than on one device
# --------------------------------------------------------------------------------------------------


def _half(
    name: str, dtype: torch.dtype, configurations: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """For each configuration the distance from float32, and the same distance on one device."""
    model, sample = getattr(zoo, name)()
    exact, alone = step(copy.deepcopy(model), sample), by_hand(model, sample, dtype)
    allowed = distance(alone, exact)
    found = {}
    with traced_once():
        plans = planned(model, sample, configurations, NAMES[dtype])
        for label, plan in plans.items():
            compiled = build(model, sample, plan=plan)
            mine = step(compiled, sample)
            assert mine.outputs["loss"].dtype == torch.float32
            assert {g.dtype for g in mine.gradients.values() if g is not None} == {torch.float32}
            loss = abs(
                float(mine.outputs["loss"] - exact.outputs["loss"]) / float(exact.outputs["loss"])
            )
            assert loss < torch.finfo(dtype).eps, (label, loss)
            found[label] = (
                distance(mine, own(exact, mine)),
                distance(own(alone, mine), own(exact, mine)),
            )
            with torch.no_grad():  # there is no dropout; batch norm alone is different
                evaluated = loss_of(compiled.eval()(**sample))
            if name != "cnn":
                torch.testing.assert_close(
                    evaluated, mine.outputs["loss"], rtol=torch.finfo(dtype).eps, atol=0
                )
    assert 0 < allowed < 0.2, (
        allowed
    )  # 0.11 for the convolutional model, because of batch norm over 8 small images
    return found


def check_half(everywhere: list[dict[str, tuple[float, float]]]) -> None:
    for found in everywhere:
        assert all(mine < 2 * allowed for mine, allowed in found.values()), found
        assert all(mine > 0 for mine, _ in found.values()), "nothing was computed in half precision"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_one_rank(ranks: Pools, dtype: torch.dtype) -> None:
    for name in ("gpt2", "cnn", "mlp"):
        check_half(ranks(1).run(_half, name, dtype, {"alone": {}}))


def test_half_precision_on_two_ranks(ranks: Pools) -> None:
    check_half(ranks(2).run(_half, "llama", torch.bfloat16, SHORT, timeout=240))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    some_of(
        ["gpt2", "llama", "bert", "vit", "cnn", "mixer", "mlp", "t5"],
        slow=["vit", "mixer"],
    ),
)
def test_half_precision_of_more_models(ranks: Pools, name: str) -> None:
    configurations = {
        label: options
        for label, options in PAIR.items()
        if name != "cnn" or "micro_batch_size" not in options
    }
    if name == "cnn":  # a buffer that the forward changes must be in one stage
        configurations.pop("recomputed")
    check_half(ranks(2).run(_half, name, torch.bfloat16, configurations, timeout=400))


@pytest.mark.parametrize("name", some_of(["gpt2", "llama"], slow=[]))
def test_half_precision_on_four_ranks(ranks: Pools, name: str) -> None:
    check_half(ranks(4).run(_half, name, torch.bfloat16, FOUR, timeout=400))
