"""Small programs lowered by hand: a two-layer network in the field's layouts, to test the runtime
on its own.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_flatten

from autopar.ir.batch_layouts import global_batch
from autopar.ir.layout import P, R, S, Type, parse_layout
from autopar.ir.plan_data import ParameterPlan
from autopar.passes.lowering.await_parameters import await_parameters
from autopar.passes.lowering.evaluation_mode import EvaluationMode
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.module.compiled import Compiled

torch.fx.wrap("redistribute")

BATCH, WIDTH, HIDDEN, OUT = 8, 6, 8, 4


class Network(nn.Module):
    """``loss`` and ``logits``; a parameter the loss does not reach, tied names, both kinds of
    buffer.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, OUT)
        self.norm = nn.LayerNorm(OUT, elementwise_affine=False)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.idle = nn.Linear(2, 2, bias=False)  # in the graph, but not in the loss
        self.again = self.fc1
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.rand(OUT), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        logits = self.fc2(F.gelu(self.fc1(x))) * self.scale
        return {
            "loss": ((logits - y) ** 2).sum() / (BATCH * OUT),
            "logits": logits,
            "idle": self.idle(x[:, :2]),
        }


STATE = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "idle.weight", "calls", "scale")


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return {
        "x": torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64),
        "y": torch.randn(BATCH, OUT, generator=generator, dtype=torch.float64),
    }


def _body(
    mesh: Any, state: tuple, x: Any, y: Any, data: tuple[int, ...], tensor: int | None, whole: bool
) -> tuple:
    w1, b1, w2, b2, idle, calls, scale = state
    start = (
        "R" if data else "I"
    )  # how activations enter tensor-parallel regions along no axis matters not
    for axis in data:
        x, y = redistribute(x, mesh, axis, "I", "S0"), redistribute(y, mesh, axis, "I", "S0")
    h = x if tensor is None else redistribute(x, mesh, tensor, "I", "R")
    out = F.linear(F.gelu(F.linear(h, w1, b1)), w2)
    if tensor is not None:
        out = redistribute(out, mesh, tensor, "P", "I")
    logits = (out + b2) * scale
    loss = ((logits - y) ** 2).sum() / (BATCH * OUT)
    spare = F.linear(x[:, :2], idle)
    for axis in reversed(data):
        loss = redistribute(loss, mesh, axis, "P", "I")
        if whole:
            logits = redistribute(logits, mesh, axis, "S0", "R")
    return loss, logits, spare, calls + (1 if start else 0)


def graph(data: tuple[int, ...], tensor: int | None, whole: bool) -> torch.fx.GraphModule:
    """The network with the batch cut along the mesh axes ``data``, and columns and rows along
    ``tensor``.
    """

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
    ) -> tuple:
        return _body(mesh, (w1, b1, w2, b2, idle, calls, scale), x, y, data, tensor, whole)

    traced = torch.fx.symbolic_trace(program)
    await_parameters(traced.graph, ("w1", "b1", "w2", "b2", "idle"))
    traced.recompile()
    return traced


def captured(model: nn.Module, sample: dict[str, torch.Tensor]) -> SimpleNamespace:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fake = torch.fx.Graph()
    nodes = {name: fake.placeholder(name.replace(".", "_")) for name in (*STATE, *sample)}
    for name, node in nodes.items():
        node.meta["val"] = (tensors.get(name) if name in tensors else sample[name]).to("meta")
    fake.output((nodes["x"], nodes["y"], nodes["x"], nodes["calls"]))
    parameters = dict(model.named_parameters())
    kinds = {
        name: "parameter" if name in parameters else "buffer" if name in tensors else "input"
        for name in nodes
    }
    return SimpleNamespace(
        graph=fake,
        inputs=tuple(
            SimpleNamespace(name=node.name, kind=kinds[name], target=name)
            for name, node in nodes.items()
        ),
        in_spec=tree_flatten(((), sample))[1],
        constant_inputs={},
        out_spec=tree_flatten({"loss": 0, "logits": 0, "idle": 0})[1],
        loss=0,
        updates=("calls",),
        state=tensors,
        aliases={"again.weight": "fc1.weight", "again.bias": "fc1.bias"},
    )


# name: (mesh sizes, axes of the batch, axis of columns and rows, {parameter: (stored, used)})
CASES: dict[
    str, tuple[tuple[int, ...], tuple[int, ...], int | None, dict[str, tuple[str, str]]]
] = {
    "one": ((1,), (), None, dict.fromkeys(STATE, ("I", "I"))),
    "data": ((2,), (0,), None, dict.fromkeys(STATE, ("I", "R"))),
    "zero": (
        (2,),
        (0,),
        None,
        {name: ("S0" if name not in ("calls", "scale") else "I", "R") for name in STATE},
    ),
    "columns": (
        (2,),
        (),
        0,
        {
            "fc1.weight": ("S0", "S0"),
            "fc1.bias": ("S0", "S0"),
            "fc2.weight": ("S1", "S1"),
            "fc2.bias": ("S0", "I"),
            "idle.weight": ("I", "I"),
        },
    ),
    "slice": (
        (2,),
        (),
        None,
        {
            "fc1.weight": ("S1", "I"),
            "fc1.bias": ("S0", "I"),
            "fc2.weight": ("I", "I"),
            "fc2.bias": ("S0", "I"),
        },
    ),
    "grid": (
        (2, 2),
        (0,),
        1,
        {
            "fc1.weight": ("S1 S0", "R S0"),
            "fc1.bias": ("I S0", "R S0"),
            "fc2.weight": ("S0 S1", "R S1"),
            "fc2.bias": ("S0 I", "R I"),
            "idle.weight": ("I S1", "R I"),
        },
    ),
    "data4": (
        (2, 2),
        (0, 1),
        None,
        {
            "fc1.weight": ("S0 S0", "R R"),
            "fc1.bias": ("S0 I", "R R"),
            "fc2.weight": ("S1 S0", "R R"),
            "fc2.bias": ("I S0", "R R"),
            "idle.weight": ("I I", "R R"),
        },
    ),
}


def build(
    case: str,
    microbatches: int = 1,
    *,
    seed: int = 0,
    whole: bool = False,
    model: nn.Module | None = None,
    hoisted: tuple[Type, ...] = (),
) -> Compiled:
    """The compiled network; with ``whole``, logits are gathered on each rank; ``hoisted`` are the
    types of what the prologue returns.
    """
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    sizes, data, tensor, parameters = CASES[case]
    model = Network(seed) if model is None else model
    layouts = {
        name: ParameterPlan(*(parse_layout(text) for text in pair))
        for name, pair in parameters.items()
    }
    cut = parse_layout(" ".join("S0" if axis in data else "I" for axis in range(len(sizes))))
    gathered = parse_layout(" ".join("R" if axis in data else "I" for axis in range(len(sizes))))
    lowered = SimpleNamespace(
        train=graph(data, tensor, whole),
        evaluate=graph(data, tensor, whole),
        prologue=None,
        parameters=layouts,
        stages=(),
        switched_modules=[],
        evaluation_mode=EvaluationMode(updates=frozenset(["calls"])),
        state=STATE,
        output_layouts=(parse_layout("I " * len(sizes)), gathered if whole else cut, cut),
        batch=global_batch(2, len(hoisted), len(sizes)),
        input_time_types=(S(0), S(0)),
        hoisted_time_types=hoisted,
        output_time_types=(P, S(0), S(0)),
        update_time_types=(R,),
        division=None,
    )
    sample = {name: tensor[: BATCH // microbatches] for name, tensor in batch().items()}
    mesh = Mesh(sizes, ("a", "b")[: len(sizes)], device="cpu")
    plan = _plan(sizes, data, layouts, microbatches)
    return Compiled(captured(model, sample), plan, lowered, mesh, model=model)  # type: ignore[arg-type]


def _plan(
    sizes: tuple[int, ...],
    data: tuple[int, ...],
    layouts: dict[str, ParameterPlan],
    microbatches: int,
) -> SimpleNamespace:
    """What the runtime reads of a plan; ``data`` are the axes that split the batch."""
    return SimpleNamespace(
        batch="global",
        mesh_sizes=sizes,
        microbatches=microbatches,
        data_degree=math.prod(sizes[axis] for axis in data),
        parameters=layouts,
        world_size=4,
        precision=None,
        reduce_dtype=None,
        backend_on=lambda device: "eager",
    )


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[union-attr]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters(remove_duplicate=False)}
