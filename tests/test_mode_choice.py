"""Where the user asks for no mode, the planner chooses a mode of tensor or sequence parallelism if
the plan is faster with it, and only then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
import zoo
from equivalence import TOLERANCE, differences, step, worst
from pool import Pools

import autopar
from autopar.cost_model import Cluster
from autopar.frontend.traced_model import TracedModel
from autopar.rules import Option
from autopar.search.fitting.fitting_plans import EQUAL
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.step_bounds import Level, least_bytes, step_bound
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import mode_mesh
from autopar.search.space.modes.mode import Mode, Operation, grid
from autopar.search.space.modes.registry import _MODES, modes_without_keywords
from autopar.search.space.options import Options


def _long_llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    """One sequence of 32768 tokens through Llama blocks of 12 heads, which do not divide by 32
    ranks.
    """
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=32768,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 32768, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}


CASES: dict[str, tuple[Any, int, str, dict[str, Any]]] = {
    "rings": (_long_llama, 32, "v100-sxm2", dict(tensor=dict(size=32, mode="sequence"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_faster_mode_is_chosen(case: str) -> None:
    """Without meshes of free axes, the plan equals the plan of the mode when the user names it, and
    is faster than plans without a mode. With them, the plan is no slower.
    """
    make, ranks, cluster, parallel = CASES[case]
    model, sample = make()
    options: dict[str, Any] = dict(cluster=cluster, progress=False)
    free = autopar.plan(model, sample, ranks, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.search.outer_search.free_meshes", lambda *near: ())
        found = autopar.plan(model, sample, ranks, **options)
    assert free.step_time <= found.step_time * (1 + EQUAL)
    named = autopar.plan(model, sample, ranks, parallel=parallel, **options)
    assert list(found.modes) == [parallel["tensor"]["mode"]]
    assert found.step_time == pytest.approx(named.step_time, rel=1e-6)
    assert (found.nodes, found.parameters, found.conversions) == (
        named.nodes,
        named.parameters,
        named.conversions,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.search.outer_search.free_meshes", lambda *near: ())
        patch.setattr("autopar.search.neighbours.mode_names", lambda: ())
        plain = autopar.plan(model, sample, ranks, **options)
    assert not plain.modes
    assert found.step_time < plain.step_time * (1 - EQUAL)
    if case == "rings":
        assert found.mesh["ring"] > 1
        assert "ring" in found.report()


TIGHT: dict[str, Any] = dict(
    cluster="a100-sxm", backend="eager", progress=False, recompute="none", memory_budget=1.15e6
)


def _too_wide() -> tuple[torch.nn.Module, dict[str, Any]]:
    return zoo.wide(dtype=torch.float64, batch=64, width=64, hidden=256)


@pytest.mark.slow
def test_no_mode_that_fits_is_faster_than_what_is_chosen() -> None:
    model, sample = _too_wide()
    found = autopar.plan(model, sample, 4, **TIGHT)
    assert max(found.peak_memory) <= TIGHT["memory_budget"]
    named = autopar.plan(model, sample, 4, parallel=dict(tensor=dict(size=4, mode="2d")), **TIGHT)
    assert max(named.peak_memory) <= TIGHT["memory_budget"]
    assert found.step_time <= named.step_time * (1 + 1e-6)


def _left_free() -> dict[str, float]:
    model, sample = _too_wide()
    expected = step(copy.deepcopy(model), sample)
    compiled = autopar.compile(model, sample, 4, **TIGHT)
    return differences(step(compiled, sample), expected)


def test_what_is_chosen_trains_as_one_device(ranks: Pools) -> None:
    for errors in ranks(4).run(_left_free, timeout=200):
        assert worst(errors)[0] < TOLERANCE[torch.float64]


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("name", ["gpt2", "mlp", "causal"])
def test_none_of_the_modes_compared_is_faster(name: str) -> None:
    model, sample = getattr(zoo, name)()
    found = autopar.plan(model, sample, 4, cluster="a100-sxm", progress=False)
    rows = autopar.compare_modes(model, sample, 4, cluster="a100-sxm", progress=False).entries
    assert found.step_time <= (1 + EQUAL) * min(
        row.plan.step_time for row in rows if row.plan is not None
    )


class Eager(Mode):
    """A mode that splits rows over all ranks, as data parallelism does."""

    def groups(
        self, rank: int, world_size: int, data: int, pipeline: int, tensor: int
    ) -> dict[str, list[int]]:
        return grid(rank, {"rows": tensor})

    def allows(self, operation: Operation, split: Mapping[str, Option]) -> bool:
        return not operation.is_activation or split["rows"].factor in operation.batch


class Refusing(Eager):
    def allows(self, operation: Operation, split: Mapping[str, Option]) -> bool:
        return False


@pytest.mark.parametrize("mode", [Eager, Refusing])
def test_a_users_own_mode_is_tried(mode: type[Mode], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that is no faster than the others changes nothing, nor does a mode that cannot run the
    model.
    """
    model, sample = zoo.mlp()
    before = autopar.plan(model, sample, 4, cluster="cpu", progress=False)
    monkeypatch.setitem(_MODES, "own", mode)
    tried: set[int] = set()

    def noted(self: Mode, rank: int, *sizes: int) -> dict[str, list[int]]:
        tried.add(self.size)
        return grid(rank, {"rows": self.size})

    monkeypatch.setattr(mode, "groups", noted)
    after = autopar.plan(model, sample, 4, cluster="cpu", progress=False)
    assert tried == {2, 4}
    assert after.nodes == before.nodes
    assert not after.modes


def test_depth_is_left_open() -> None:
    """Every depth for which the ranks form square meshes is tried."""
    found = {
        size: [mode.depth for mode in modes_without_keywords("2.5d", size)]
        for size in (4, 8, 10, 16, 32)
    }  # type: ignore[attr-defined]
    assert found == {4: [], 8: [2], 10: [], 16: [4], 32: [2, 8]}
    meshes = Options(32, dict(tensor=dict(size=32, mode="2.5d"))).meshes(1)
    assert [{a.name: a.size for a in axes} for axes in meshes] == [
        {"depth": 2, "row": 4, "column": 4},
        {"depth": 8, "row": 2, "column": 2},
    ]


def test_what_bounds_a_mode_is_below_its_best() -> None:
    """Bounds of seconds and bytes without a solve are below the seconds and bytes of solutions."""
    traced, cluster = TracedModel(*zoo.gpt2(), None), Cluster.load("cpu")
    cache = traced.search_cache(1, cluster)
    search = InnerSearch(cache.analysis, cluster, Options(4), cache=cache)
    for mode in (m for name in _MODES for m in modes_without_keywords(name, 4)):
        shape = Configuration(1, mode_mesh(mode, 1, 1), 1)
        prices = search.prices(shape, 8)
        fastest, leanest = prices.at(0.0), prices.at(1.0)
        bound = step_bound(search, shape, 8, Level.UNSOLVED).bound
        assert 0.0 < bound <= prices.seconds(fastest) * (1 + 1e-9)
        assert 0.0 < least_bytes(search, shape, 8) <= prices.nbytes(leanest)
