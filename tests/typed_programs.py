"""A program written call by call, with the types of its values, for the type checker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import fx

from autopar.ir.layout import parse_layout
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.typecheck.checker import check_types


@contextmanager
def fake_group() -> Iterator[None]:
    """Within, there is a process group of 4 ranks that sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Program:
    """A graph under construction, with the local shapes and types of its inputs."""

    def __init__(self, *sizes: int) -> None:
        self.mesh_value = Mesh(sizes, tuple("abc"[: len(sizes)]))
        self.graph = fx.Graph()
        self.mesh = self.graph.placeholder("mesh")
        self.values: list[torch.Tensor] = []
        self.types: list = []

    def input(
        self,
        shape: tuple[int, ...],
        layout: str,
        grad: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> fx.Node:
        self.values.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad))
        self.types.append(parse_layout(layout))
        return self.graph.placeholder(f"input_{len(self.values)}")

    def call(self, target: object, *args: object, layout: str | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta.update(module="model.layers.0", source="model.py:7")
        if layout:
            node.meta["layout"] = parse_layout(layout)
        return node

    def to(self, x: fx.Node, axis: int, src: str, dst: str) -> fx.Node:
        return self.call(redistribute, x, self.mesh, axis, src, dst)

    def check(self, *results: fx.Node, outputs: str | None = None) -> list[str]:
        self.graph.output(results)
        claims = None if outputs is None else [parse_layout(text) for text in outputs.split(",")]
        return check_types(
            fx.GraphModule({}, self.graph), self.mesh_value, self.values, self.types, claims
        )
