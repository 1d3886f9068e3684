"""Plan files that were edited at random: what may become of each, in one process and on real
ranks.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

Data = dict[str, Any]
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
