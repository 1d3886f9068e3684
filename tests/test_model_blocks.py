"""Programs in parts, one for each block of the model, compute what they compute whole."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import equivalence
import pytest
import torch
import zoo
from torch import fx

import autopar
from autopar.ir.model_blocks import number_blocks
from autopar.runtime.compilation.backends import EagerBackend
from autopar.runtime.compilation.block_parts import cut_into_parts
from autopar.runtime.pipeline import recompute


def calls_of(model: torch.nn.Module, sample: Any) -> list[fx.Node]:
    program = autopar.compile(model, sample, 1, progress=False)
    return [n for n in program._lowered.train.graph.nodes if n.op == "call_function"]


def test_blocks_are_numbered_in_their_order() -> None:
    numbers = number_blocks(calls_of(*zoo.llama(layers=3)))
    found: dict[str, set[int]] = {}
    for call, number in numbers.items():
        found.setdefault(".".join(call.meta["module"].split(".")[:3]), set()).add(number)
    assert [found[f"model.layers.{i}"] for i in range(3)] == [{1}, {2}, {3}]
    assert found["model.embed_tokens"] == found["model.rotary_emb"] == {0}
    assert found["model.norm"] == found["lm_head"] == {4}


def test_a_model_without_blocks_is_one() -> None:
    assert set(number_blocks(calls_of(*zoo.mlp())).values()) <= {0}


class InParts(EagerBackend):
    """Runs the parts of a program eagerly."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.roots: list[Collection[int]] = []

    def run(self, program: Any, arguments: Any, roots: Any) -> Any:
        cut = cut_into_parts(program, roots, self._part)
        assert cut is not None
        return recompute.run(cut, self._mesh, arguments)

    def _part(self, program: Any, arguments: Any, roots: Collection[int]) -> Any:
        self.roots.append(roots)
        results = program(self._mesh, *arguments)
        # As in compiled programs, no gradient comes back for other results.
        return [x if i in roots else x.detach() for i, x in enumerate(results)]


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize(
    ("name", "parts", "options"),
    [
        ("gpt2", 4, dict(dropout=0.1)),
        ("llama", 4, {}),
        ("t5", 6, {}),
        ("vit", 4, {}),
        ("bert", 4, {}),
        ("mixtral", 4, {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_parts_compute_what_the_program_computes(
    name: str, parts: int, options: dict[str, Any]
) -> None:
    model, sample = getattr(zoo, name)(dtype=torch.float64, **options)
    steps = []
    for backend in (EagerBackend, InParts):
        program = autopar.compile(copy.deepcopy(model), sample, 1, progress=False)
        program._runner._work._backend = runner = backend(program.mesh)
        torch.manual_seed(3)
        steps.append(equivalence.step(program, sample))
    assert equivalence.worst(equivalence.differences(*steps)) < (1e-12, "")
    assert isinstance(runner, InParts)
    assert len(runner.roots) == parts
    assert all(len(roots) >= 1 for roots in runner.roots)
