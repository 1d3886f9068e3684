"""The second opinion: ``autopar.runtime.typecheck.checker`` was written apart, and must find every
option well typed, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from emulate import Program, Row, cut, every
from rule_rows import MORE, ROWS
from rule_rows.strategies import some_strategies

from autopar.errors import RunError
from autopar.ir.nodes import set_operand
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.typecheck.checker import check_types
from autopar.search.space.strategies import Strategy


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("fake", rank=0, world_size=4)
    yield Mesh((2, 2), ("a", "b"))
    dist.destroy_process_group()


def _typed(program: Program, strategy: Strategy, mesh: Mesh) -> list[str]:
    call = program.local(strategy, mesh.sizes)
    values = [
        cut(x, layout, mesh.sizes)[0].detach().requires_grad_(g)
        for x, layout, g in zip(program.tensors, strategy.ins, program.trains, strict=True)
    ]
    with call.graph.inserting_before(call):
        inputs = [
            call.graph.placeholder(f"operand_{k}") for k in range(len(values))
        ]  # a tensor that is read twice may have two layouts
    for k, placeholder in enumerate(inputs):
        set_operand(call, k, placeholder)
    for old in [
        n
        for n in call.graph.nodes
        if n.op == "placeholder" and n.name != "mesh" and n not in inputs
    ]:
        call.graph.erase_node(old)
    return check_types(fx.GraphModule(torch.nn.Module(), call.graph), mesh, values, strategy.ins)


@pytest.mark.parametrize(
    ("example", "at_most"),
    [*((r, None) for r in ROWS), *((r, 4) for r in MORE)],
    ids=lambda given: str(given) if isinstance(given, Row) else "",
)
def test_every_option_is_well_typed(example: Row, at_most: int | None, mesh: Mesh) -> None:
    program = Program(example)
    for strategy in (
        every(program, mesh.sizes)
        if at_most is None
        else some_strategies(program, mesh.sizes, at_most)
    ):
        try:
            _typed(program, strategy, mesh)
        except RunError as e:
            raise AssertionError(f"{example.name}: {strategy}: {e}") from e
