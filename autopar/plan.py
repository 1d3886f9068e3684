"""A plan: all that was decided, as data. The only thing that search hands to passes, and what a user saves, reads and edits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.layout import Layout, parse, parse_type, show

VERSION = 1
EXACT_AXES = 2  # on meshes of more axes the search is exact in neighbourhoods only
BUCKET_BYTES = 25 << 20  # the most that one collective takes of gradients, or of gathered parameters, in a step

Step = tuple[int, str, str]  # one conversion along one axis: (axis, from, to)


@dataclass(frozen=True)
class NodePlan:
    """How one node runs: each operand's layout, the output's, and per axis the factor split and the kernel that takes."""

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[str | None, ...]
    kernels: tuple[str | None, ...]


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter or buffer is kept between steps, and as what the graph sees it."""

    stored: Layout
    used: Layout


@dataclass(frozen=True)
class Plan:
    """A distributed program for one model, sample input and cluster.

    Attributes:
        fingerprint: a hash of the captured graph; a plan compiles only the graph it was made for.
        mesh_sizes, mesh_names: the mesh's axes, slowest links first.
        microbatches: parts that each data-parallel rank's share of the batch is run in, one after the other.
        data_degree: ways the batch is split over ranks.
        nodes, parameters: by node name, and by the parameter's name in the model.
        conversions: for a tensor, by the layout wanted, the steps that convert it.
        seconds: the predicted step time by kind; their sum is :attr:`step_time`.
        nbytes: the predicted peak memory of one device by kind; their sum is :attr:`peak_memory`.
        gap: proven distance to the best plan of this search space, relative to the step time (0 is optimal); on a mesh of more than
            two axes, to the best of the neighbourhood that was searched last.
        rows: what the report shows of each block and its collectives.
        notes: what a user should know: operators without a rule, statistics per microbatch, …
        timings: seconds that planning took, by phase.
    """

    fingerprint: str
    world_size: int
    cluster: str
    mesh_sizes: tuple[int, ...]
    mesh_names: tuple[str, ...]
    microbatches: int
    data_degree: int
    nodes: dict[str, NodePlan]
    parameters: dict[str, ParameterPlan]
    conversions: dict[str, dict[str, tuple[Step, ...]]]
    seconds: dict[str, float]
    nbytes: dict[str, float]
    gap: float
    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict, compare=False)
    options: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """ValueError where the parts do not fit together."""
        axes = len(self.mesh_sizes)
        if math.prod(self.mesh_sizes) != self.world_size or len(self.mesh_names) != axes:
            raise ValueError(f"a mesh of sizes {self.mesh_sizes} named {self.mesh_names} is none of {self.world_size} ranks")
        for name, node in self.nodes.items():
            if any(len(layout) != axes for layout in (*node.ins, node.out, node.factors, node.kernels)):
                raise ValueError(f"node {name!r} has not one type for each of the {axes} mesh axes")
        for name, parameter in self.parameters.items():
            if len(parameter.stored) != axes or len(parameter.used) != axes:
                raise ValueError(f"parameter {name!r} has not one type for each of the {axes} mesh axes")

    @property
    def step_time(self) -> float:
        """Predicted seconds of one training step."""
        return sum(self.seconds.values())

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Predicted bytes for each stage's device."""
        return (sum(self.nbytes.values()),)

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes by name, slowest links first."""
        return dict(zip(self.mesh_names, self.mesh_sizes, strict=True))

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return 1

    def report(self) -> str:
        """The plan for people: mesh, blocks, collectives, memory, time."""
        from autopar.report import text

        return text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON: the whole file or nothing."""
        path = Path(path)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump({"version": VERSION, **_to_data(self)}, file, indent=1)
        os.replace(file.name, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: the file is no plan, or of another version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data.pop("version")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise PlanError(f"{os.fspath(path)} is no plan: {e!r}. Plan.save writes one") from e
        if version != VERSION:
            raise PlanError(f"{os.fspath(path)} has plan version {version}, this autopar reads {VERSION}: plan again")
        try:
            return _from_data(data)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanError(f"{os.fspath(path)} is a damaged plan: {e!r}. Plan again, or undo the edit") from e


def _to_data(plan: Plan) -> dict[str, Any]:
    data = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    data["nodes"] = {
        name: {"in": [show(i) for i in n.ins], "out": show(n.out), "factors": list(n.factors), "kernels": list(n.kernels)}
        for name, n in plan.nodes.items()
    }
    data["parameters"] = {name: {"stored": show(p.stored), "used": show(p.used)} for name, p in plan.parameters.items()}
    return data


def _from_data(data: dict[str, Any]) -> Plan:
    nodes = {
        name: NodePlan(tuple(parse(i) for i in n["in"]), parse(n["out"]), tuple(n["factors"]), tuple(n["kernels"]))
        for name, n in data["nodes"].items()
    }
    parameters = {name: ParameterPlan(parse(p["stored"]), parse(p["used"])) for name, p in data["parameters"].items()}
    conversions = {
        name: {
            wanted: tuple((int(a), repr(parse_type(s)), repr(parse_type(t))) for a, s, t in steps) for wanted, steps in by_layout.items()
        }
        for name, by_layout in data["conversions"].items()
    }
    tuples = {key: tuple(data[key]) for key in ("mesh_sizes", "mesh_names", "notes")}
    return Plan(**{**data, **tuples, "nodes": nodes, "parameters": parameters, "conversions": conversions})
