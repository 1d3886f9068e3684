"""A mode that a user registers, and the meshes that follow from the groups of modes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import zoo
from equivalence import TOLERANCE, Outcome, check
from pool import Pools

import autopar
from autopar.errors import PlanError, RunError
from autopar.rules import Option
from autopar.runtime.communication.mesh import Mesh
from autopar.search.space.modes.mode import Mode, Operation, grid
from autopar.search.space.modes.registry import _MODES
from autopar.search.space.options import Options


class Rows(Mode):
    """Features are cut over ``inner`` neighbouring ranks, and samples over the others."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__(size)
        if size % inner:
            raise ValueError(f"inner={inner} does not divide size={size}")
        self.inner = inner

    def groups(
        self, rank: int, world_size: int, data: int, pipeline: int, tensor: int
    ) -> dict[str, list[int]]:
        return grid(rank, {"samples": tensor // self.inner, "features": self.inner})

    def allows(self, operation: Operation, split: Mapping[str, Option]) -> bool:
        return split["features"].factor not in operation.batch

    def prefers(self, operation: Operation, split: Mapping[str, Option]) -> bool:
        return not operation.is_activation or split["samples"].factor in operation.batch


class Strided(Rows):
    """The same mode, but the ranks of a tensor group are not neighbours."""

    def groups(
        self, rank: int, world_size: int, data: int, pipeline: int, tensor: int
    ) -> dict[str, list[int]]:
        stage, stride = data * tensor, data * tensor // self.inner
        first, place = rank // stage * stage, rank % stage
        row = first + place // stride * stride + place % data
        return {
            "features": [first + place % stride + i * stride for i in range(self.inner)],
            "samples": [row + i * data for i in range(tensor // self.inner)],
        }


class Broken(Rows):
    """The groups overlap: they form no grid."""

    def groups(
        self, rank: int, world_size: int, data: int, pipeline: int, tensor: int
    ) -> dict[str, list[int]]:
        return {"samples": [rank, (rank + 1) % tensor], "features": [rank, rank ^ 1]}


@pytest.fixture
def own_modes() -> Iterator[None]:
    known = dict(_MODES)
    for name, mode in (("rows", Rows), ("strided", Strided), ("broken", Broken)):
        autopar.register_mode(name)(mode)
    yield
    _MODES.clear()
    _MODES.update(known)


def _with_own_modes(name: str, options: dict[str, Any]) -> tuple[dict[str, Outcome], Any]:
    autopar.register_mode("rows")(Rows)
    found = check(name, torch.float64, options)
    model, sample = getattr(zoo, name)()
    mesh = autopar.compile(model, sample, 4, progress=False, **options["rows"]).mesh
    return found, [
        (mesh.ranks(n), mesh.local_rank(n), mesh.group_size(n))
        for n in ("rows", "samples", "features")
    ]


def test_a_users_own_mode(ranks: Pools) -> None:
    options = dict(
        rows=dict(cluster="cpu", parallel=dict(tensor=dict(size=4, mode="rows", inner=2)))
    )
    everywhere = ranks(4).run(_with_own_modes, "gpt2", options, timeout=120)
    for rank, (found, groups) in enumerate(everywhere):
        assert found["rows"].worst[0] < TOLERANCE[torch.float64]
        assert found["rows"].plan.mesh == {"samples": 2, "features": 2}
        assert groups == [
            ([0, 1, 2, 3], rank, 4),
            ([rank % 2, rank % 2 + 2], rank // 2, 2),
            ([rank // 2 * 2, rank // 2 * 2 + 1], rank % 2, 2),
        ]


def _axes(world_size: int, **parallel: Any) -> list[dict[str, int]]:
    options = Options(world_size, parallel)
    assert options.pipeline is not None
    return [{a.name: a.size for a in axes} for axes in options.meshes(options.pipeline.size)]


@pytest.mark.usefixtures("own_modes")
def test_the_mesh_follows_from_a_modes_groups() -> None:
    def own(mode: str, size: int, inner: int) -> dict[str, Any]:
        return dict(tensor=dict(size=size, mode=mode, inner=inner))

    assert _axes(16, pipeline=2, **own("rows", 4, 2)) == [{"data": 2, "samples": 2, "features": 2}]
    assert list(_axes(16, pipeline=2, **own("strided", 4, 2))[0].items()) == [
        ("features", 2),
        ("samples", 2),
        ("data", 2),
    ]
    assert _axes(4, **own("rows", 4, 4)) == [{"features": 4}]
    with pytest.raises(PlanError, match="inner=3 does not divide size=4"):
        _axes(4, **own("rows", 4, 3))
    with pytest.raises(
        PlanError, match="mode 'broken': its groups are no grid of a stage's 4 ranks"
    ):
        _axes(4, **own("broken", 4, 2))
    with pytest.raises(PlanError, match=r"write a class that inherits from autopar\.Mode"):
        autopar.register_mode("other")(int)  # type: ignore[type-var]


def test_the_meshes_of_the_built_in_modes() -> None:
    assert _axes(8, tensor=dict(size=4, mode="2d")) == [{"data": 2, "row": 2, "column": 2}]
    assert _axes(8, tensor=dict(size=8, mode="2.5d", depth=2)) == [
        {"depth": 2, "row": 2, "column": 2}
    ]
    assert _axes(27, tensor=dict(size=27, mode="3d")) == [{"weight": 3, "input": 3, "output": 3}]
    sequence = _axes(4, tensor=dict(size=4, mode="sequence"))
    assert sequence == [{"heads": 4}, {"ring": 2, "heads": 2}, {"ring": 4}]
    assert _axes(8, pipeline=dict(size=2), tensor=dict(size=4, mode="1d")) == [{"tensor": 4}]
    for first, second in itertools.product([4, 8], [4, 8]):
        one, other = (
            Options(n, dict(tensor=dict(size=n, mode="1d"))).meshes(1)[0] for n in (first, second)
        )
        assert (one == other) == (first == second)


def _names() -> None:
    mesh = Mesh((2, 2), ("row", "column"), modes={"2d": ("row", "column")})
    assert mesh.ranks("2d") == [0, 1, 2, 3]
    assert mesh.group_size("row") == 2
    with pytest.raises(RunError, match="no axis or mode 'depth': it has row, column, 2d"):
        mesh.group("depth")


def test_groups_by_name(ranks: Pools) -> None:
    ranks(4).run(_names)
