"""Plan files that were edited at random: what may become of each, in one process and on real
ranks.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import differences, own, step, traced_once, worst
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.errors import AutoparError, PlanError, RunError
from autopar.frontend.traced_model import TracedModel
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.search.plan_check.check_plan import check_batch, check_plan

Data = dict[str, Any]
Made = tuple[nn.Module, dict[str, torch.Tensor]]


class Language(nn.Module):
    """Embeddings, two blocks of attention and an MLP, a head."""

    def __init__(self, width: int = 8, words: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(8, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    norm=nn.LayerNorm(width),
                    qkv=nn.Linear(width, 3 * width),
                    up=nn.Linear(width, 16),
                    down=nn.Linear(16, width),
                )
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            q, k, v = (
                t.unflatten(-1, (2, -1)).transpose(1, 2)
                for t in block["qkv"](block["norm"](x)).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
                2
            )
            x = x + block["down"](F.gelu(block["up"](x)))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Convolutions(nn.Module):
    """Two convolutions, one with BatchNorm, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3),
            nn.Linear(8, 4),
        )
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(self.norm(self.first(x)))
        logits = self.head(self.second(y).mean((2, 3)) * self.scale)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make(name: str) -> Made:
    """A model and its batch, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "convolutions":
            return Convolutions().double(), {
                "x": torch.randn(8, 4, 6, 6, dtype=torch.float64),
                "labels": torch.randint(4, (8,)),
            }
        return Language().double(), {name: torch.randint(16, (8, 8)) for name in ("ids", "labels")}


def _mode(name: str, size: int) -> Data:
    return dict(parallel=dict(tensor=dict(size=size, mode=name)))


KINDS: dict[str, tuple[str, int, Data]] = {  # a model, ranks, options
    "data": ("convolutions", 2, dict(parallel=dict(data=2), zero=0)),
    "tensor": ("language", 2, _mode("1d", 2)),
    "zero": ("language", 2, dict(parallel=dict(data=2), zero=2)),
    "sequence": ("language", 2, _mode("sequence", 2)),
    "pipeline": ("language", 2, dict(parallel=dict(pipeline=2), micro_batch_size=2)),
    "2d": ("language", 4, _mode("2d", 4)),
}


def plan(kind: str) -> autopar.Plan:
    """The plan whose file is edited."""
    name, ranks, options = KINDS[kind]
    return autopar.plan(*make(name), ranks, progress=False, **options)


# -- edits
# --------------------------------------------------------------------------------------------------

JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    1.5,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "x",
    "S0",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    "I I",
)
TYPES = ("I", "R", "P", "S0", "S1", "S2", "S0/2", "S1/3", "Z0", "Z1", "s0", "S7", "Q")
Edit = Callable[[Data, random.Random], None]


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a plan with each of its keys; of long tables no more than of the
    others.
    """
    keys = (
        list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    )
    for key in keys:
        yield data, key
        yield from _places(data[key])


def _place(data: Data, rng: random.Random) -> tuple[Any, Any]:
    part = rng.choice(list(data))
    return rng.choice([(data, part), *list(_places(data[part]))])


def _delete(data: Data, rng: random.Random) -> None:
    held, key = _place(data, rng)
    del held[key]


def _replace(data: Data, rng: random.Random) -> None:
    held, key = _place(data, rng)
    held[key] = rng.choice(JUNK)


def _rename(data: Data, rng: random.Random) -> None:
    held, key = _place(data, rng)
    if isinstance(key, str):
        held[rng.choice([key + "x", key[:-1], rng.choice(list(held))])] = held.pop(key)


def _swap(data: Data, rng: random.Random) -> None:
    held, key = _place(data, rng)
    other = rng.choice(list(held) if isinstance(held, dict) else range(len(held)))
    held[key], held[other] = held[other], held[key]


def _number(data: Data, rng: random.Random) -> None:
    name = rng.choice(
        [
            "world_size",
            "mesh_sizes",
            "microbatches",
            "data_degree",
            "pipeline",
            "gap",
            "stages",
            "seconds",
        ]
    )
    held, key = (
        (data, name)
        if not isinstance(data[name], (list, dict))
        else rng.choice(list(_places(data[name])))
    )
    if isinstance(held[key], (int, float)):
        held[key] = rng.choice(
            [
                held[key] + 1,
                held[key] * 2,
                -held[key],
                0,
                2**60,
                held[key] + 0.5,
                bool(held[key]),
                str(held[key]),
            ]
        )


def _layout(data: Data, rng: random.Random) -> None:
    """One type of a node's or parameter's layout is another."""
    if rng.random() < 0.5:
        node = data["nodes"][rng.choice(list(data["nodes"]))]
        place, key = (
            (node, "out")
            if not node["in"] or rng.random() < 0.5
            else (node["in"], rng.randrange(len(node["in"])))
        )
    else:
        place, key = (
            data["parameters"][rng.choice(list(data["parameters"]))],
            rng.choice(["stored", "used"]),
        )
    _change_type(place, key, rng)


def _change_type(place: Any, key: Any, rng: random.Random) -> None:
    types = place[key].split() or [""]
    types[rng.randrange(len(types))] = rng.choice(TYPES)
    place[key] = " ".join(types)


def _parameter(data: Data, rng: random.Random) -> None:
    """A parameter lies otherwise, and so its placeholder and what reads it: an edit that thinks of
    all but whether it is right.
    """
    name = rng.choice(list(data["parameters"]))
    node = name.replace(".", "_")
    found = [n for n in data["nodes"] if n.endswith(node)]
    kept = data["parameters"][name]
    _change_type(kept, rng.choice(["stored", "used"]), rng)
    if rng.random() < 0.5:
        kept["stored"] = kept["used"]
    for each in found:
        data["nodes"][each]["out"] = kept["used"]
        if rng.random() < 0.7:
            data["conversions"].pop(each, None)


def _node(data: Data, rng: random.Random) -> None:
    """A node has what another has."""
    names = list(data["nodes"])
    one, other = rng.choice(names), rng.choice(names)
    key = rng.choice(["in", "out", "factors", "kernels"])
    data["nodes"][one][key] = copy.deepcopy(data["nodes"][other][key])
    if rng.random() < 0.3:
        data["nodes"][one] = copy.deepcopy(data["nodes"][other])


def _split(data: Data, rng: random.Random) -> None:
    """A factor or a kernel is another."""
    node = data["nodes"][rng.choice(list(data["nodes"]))]
    found = rng.choice([".0", ".1", "k", "n", "v", "b", "d0", "r0", "x", None, 3])
    kernel = rng.choice(
        [
            "summa",
            "ring",
            "layer_norm",
            "embedding_vocabulary",
            "mean",
            "batch_norm",
            "dropout",
            "attention",
            "x",
            None,
            3,
        ]
    )
    for key, value in (("factors", found), ("kernels", kernel)):
        if node[key] and rng.random() < 0.6:
            node[key][rng.randrange(len(node[key]))] = value


def _conversion(data: Data, rng: random.Random) -> None:
    if not data["conversions"]:
        return
    tensor = rng.choice(list(data["conversions"]))
    paths = data["conversions"][tensor]
    wanted = rng.choice(list(paths))
    how = rng.randrange(5)
    if how == 0:
        del paths[wanted]
    elif how == 1:
        data["conversions"][rng.choice(list(data["nodes"]))] = data["conversions"].pop(tensor)
    elif how == 2 and paths[wanted]:
        rng.choice(paths[wanted])[rng.randrange(3)] = rng.choice([0, 1, 2, -1, *TYPES])
    elif how == 3:
        paths[wanted] = paths[wanted][:-1] if rng.random() < 0.5 else paths[wanted] * 2
    else:
        paths[rng.choice(TYPES)] = paths[wanted]


def _recomputed(data: Data, rng: random.Random) -> None:
    names = [
        *data["nodes"],
        *(f"{n} -> {rng.choice(TYPES)}" for n in data["conversions"]),
        *(f"{n} -> {w}" for n, p in data["conversions"].items() for w in p),
    ]
    data["recomputed"] = (
        rng.sample(names, rng.randrange(1, 6)) if rng.random() < 0.8 else rng.choice(names)
    )


def _stage(data: Data, rng: random.Random) -> None:
    how, stage = rng.randrange(4), rng.choice(data["stages"])
    if how == 0:
        stage["start"] = rng.choice([*data["nodes"], "", "nothing"])
    elif how == 1:
        data["stages"].append(copy.deepcopy(stage))
    elif how == 2:
        data["stages"].remove(stage)
    else:
        data["stages"].reverse()


def _word(data: Data, rng: random.Random) -> None:
    name = rng.choice(
        [
            "schedule",
            "precision",
            "reduce_dtype",
            "fingerprint",
            "cluster",
            "mesh_names",
            "modes",
            "version",
        ]
    )
    data[name] = rng.choice(
        [
            "gpipe",
            "1f1b",
            "interleaved-1f1b",
            "zero-bubble",
            "fp32",
            "tf32",
            "fp8",
            "",
            ["a"],
            ["a", "a"],
            {"2d": ["x"]},
            5,
            None,
        ]
    )


EDITS: tuple[Edit, ...] = (
    _delete, _replace, _rename, _swap, _number, _layout, _layout, _parameter, _parameter, _node,
    _split, _conversion, _recomputed, _stage, _word,
)  # fmt: skip


def edited(text: str, seed: str) -> str:
    """A plan's file with one to three random edits, or damage to its text."""
    rng = random.Random(seed)
    if rng.random() < 0.05:
        at = rng.randrange(len(text))
        return rng.choice(
            [
                text[:at],
                text[:at] + rng.choice('{}[]",:0x') + text[at + 1 :],
                text[at:],
                text[:at] + "[" * 10**5,
            ]
        )
    data = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        with suppress(
            KeyError, TypeError, AttributeError, IndexError, ValueError
        ):  # an earlier edit left nothing for this one
            rng.choice(EDITS)(data, rng)
    return json.dumps(data)


# -- what becomes of them
# --------------------------------------------------------------------------------------------------


def refused(text: str, traced: TracedModel) -> AutoparError | autopar.Plan:
    """The error of a plan's file, found as ``compile`` finds it; or else the plan."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            found = autopar.Plan.load(file.name)
            check_batch(found, 8)
            analysis, _ = traced.analyse(found.microbatches)
            if analysis.captured.fingerprint != found.fingerprint or found.precision is not None:
                return RunError("the plan was made for another graph")
            if len(found.stages) > 1:
                analysis = cut_stages(analysis, [stage.start for stage in found.stages[1:]])
            check_plan(found, analysis)
        except (PlanError, RunError) as e:
            return e
        return found


def program(found: autopar.Plan) -> str:
    """What of a plan runs: plans that say the same of it run alike."""
    starts = [stage.start for stage in found.stages]
    parts = (
        found.nodes,
        found.parameters,
        found.conversions,
        starts,
        sorted(found.recomputed),
        found.microbatches,
        found.schedule,
    )
    return repr(
        (
            *parts,
            found.mesh,
            found.pipeline,
            found.data_degree,
            found.reduce_dtype,
            found.world_size,
            found.modes,
        )
    )


def run(kind: str, plans: list[autopar.Plan]) -> list[str]:
    """Runs on each rank: what became of each plan: "right", an error that is one of autopar's, or
    what was wrong.
    """
    _clear_sharding_prop_cache()
    name, ranks, _ = KINDS[kind]
    model, sample = make(name)
    expected = step(copy.deepcopy(model), sample)
    results = []
    with traced_once():
        for each in plans:
            try:
                compiled = autopar.compile(
                    copy.deepcopy(model), sample, ranks, plan=each, progress=False
                )
                mine = step(compiled, sample)
                error, of = worst(differences(mine, own(expected, mine)))
                close = 1e-9 if each.reduce_dtype is None else 1e-5
                results.append("right" if error < close else f"wrong: {of} is off by {error:.2g}")
            except AutoparError as e:
                results.append(f"refused late: {e}")
            except Exception as e:
                results.append(f"crashed: {type(e).__name__}: {e}")
    return results
