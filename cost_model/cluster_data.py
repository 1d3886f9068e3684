"""A cluster as JSON data. ``schema`` is the version of the format.

The file describes one kind of device, its links, and the figures of each software; or the clusters
of several kinds (``parts``) and the link between them. A cluster in memory has one software.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from autopar.cost_model.device import Device, Tile
from autopar.cost_model.links import CollectiveFigures, Level
from autopar.cost_model.products import Product
from autopar.cost_model.software import Software
from autopar.errors import PlanError

SCHEMA = 3
_REQUIRED = ("name", "device", "software", "links")
_OPTIONAL = ("sources", "machine")


def cluster_fields(data: Any, software: str | None) -> dict[str, Any]:
    """The arguments of :class:`Cluster` from the contents of a file.

    Args:
        data: what the file holds.
        software: the name of one of its software; None takes the first.

    Raises:
        PlanError: another schema, or a field is missing, unknown or out of range.
    """
    given = _given(data, _REQUIRED, _OPTIONAL)
    chosen, is_default = _software(given["software"], software)
    sources = {
        path: source
        for path, source in _object("sources", given.get("sources", {})).items()
        if not path.startswith("software.") or path.startswith(f"software.{chosen.name}.")
    }
    if not isinstance(given["links"], list):
        raise PlanError(
            f"links is {type(given['links']).__name__}: give a list of levels, fastest first"
        )
    return {
        "name": given["name"] if is_default else f"{given['name']}:{chosen.name}",
        "device": _device(given["device"]),
        "software": chosen,
        "links": tuple(_level(f"links[{i}].", each) for i, each in enumerate(given["links"])),
        "sources": sources,
        "machine": given.get("machine", {}),
    }


def is_joined(data: Any) -> bool:
    """Whether the contents of a file describe a cluster of several kinds of devices."""
    return isinstance(data, dict) and "parts" in data


def joined_fields(data: Any) -> tuple[str | None, list[tuple[Any, Any]], Level]:
    """The name of a cluster of several kinds; for each kind its preset, path or file contents, and
    its number of devices; and the link between them.

    Raises:
        PlanError: another schema, or a field is missing or unknown.
    """
    given = _given(data, ("parts", "link"), ("name",))
    if not isinstance(given["parts"], list):
        raise PlanError(f"parts is {type(given['parts']).__name__}: give a list of groups")
    parts = [
        _check_names(f"parts[{i}].", part, dict(cluster=True, devices=True))
        for i, part in enumerate(given["parts"])
    ]
    link = _level("link.", {"size": None, **_object("link", given["link"])})
    return given.get("name"), [(part["cluster"], part["devices"]) for part in parts], link


def _given(data: Any, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """The fields of a file's contents, after a check of their names and of the schema."""
    if not isinstance(data, dict):
        raise PlanError(
            f"expected an object with schema, {', '.join(required[:-1])} and {required[-1]}, found "
            f"{type(data).__name__}"
        )
    if (found := data.get("schema")) != SCHEMA:
        renew = (
            "measure it again with: python -m autopar profile -o FILE (under torchrun for "
            "several ranks)"
        )
        raise PlanError(f"its schema is {found!r}, this version reads {SCHEMA}: {renew}")
    given = {key: value for key, value in data.items() if key != "schema"}
    return _check_names("", given, dict.fromkeys(required, True) | dict.fromkeys(optional, False))


def as_data(cluster: Any) -> dict[str, Any]:
    """The contents of a cluster's file."""
    if cluster.parts:
        parts = [{"cluster": as_data(part), "devices": count} for part, count in cluster.parts]
        link = asdict(cluster.link)
        return {"schema": SCHEMA, "name": cluster.name, "parts": parts, "link": link}
    figures = asdict(cluster)
    del figures["parts"], figures["link"]
    software = figures.pop("software")
    data = {"schema": SCHEMA, "name": figures.pop("name"), "device": figures.pop("device")}
    return data | {"software": {software.pop("name"): software}} | figures


def _software(data: Any, name: str | None) -> tuple[Software, bool]:
    """The software that ``name`` names, and whether it is the first."""
    if not isinstance(data, dict) or not data:
        raise PlanError(
            f"software is {data!r:.100}: give an object with the figures of at least one software "
            "by name"
        )
    chosen = next(iter(data)) if name is None else name
    if chosen not in data:
        raise PlanError(f"software={chosen!r}: this cluster describes {', '.join(data)}")
    given = _checked(Software, f"software.{chosen}.", data[chosen], given=("name",))
    return Software(chosen, **given), chosen == next(iter(data))


def _device(data: Any) -> Device:
    given = dict(_checked(Device, "device.", data))
    tiles = [
        Tile(**_checked(Tile, f"device.tiles[{i}].", tile))
        for i, tile in enumerate(given.pop("tiles", ()))
    ]
    products = [
        Product(**_checked(Product, f"device.products[{i}].", product))
        for i, product in enumerate(given.pop("products", ()))
    ]
    efficiency = given.pop("efficiency")
    curves = (
        {name: _points(curve) for name, curve in efficiency.items()}
        if isinstance(efficiency, Mapping)
        else efficiency
    )
    return Device(**given, efficiency=curves, tiles=tuple(tiles), products=tuple(products))


def _level(prefix: str, data: Any) -> Level:
    given = _checked(Level, prefix, data)
    curves = {
        kind: {ranks: _points(c) for ranks, c in _object(f"{prefix}measured", by_ranks).items()}
        for kind, by_ranks in _object(f"{prefix}measured", given.get("measured", {})).items()
    }
    figures = {
        kind: CollectiveFigures(**_checked(CollectiveFigures, f"{prefix}collectives.{kind}.", each))
        for kind, each in _object(f"{prefix}collectives", given.get("collectives", {})).items()
    }
    return Level(**{**given, "measured": curves, "collectives": figures})


def _checked(cls: type, prefix: str, data: Any, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """``data``, after a check that its keys are the fields of the dataclass ``cls`` except
    ``given``.
    """
    known = {
        f.name: f.default is MISSING and f.default_factory is MISSING
        for f in fields(cls)
        if f.name not in given
    }
    return _check_names(prefix, data, known)


def _check_names(prefix: str, data: Any, known: Mapping[str, bool]) -> dict[str, Any]:
    """``data``, after a check of its keys; ``known`` says of each whether it is required."""
    _object(prefix.rstrip("."), data)
    missing = [prefix + name for name, required in known.items() if required and name not in data]
    if missing:
        raise PlanError(f"missing {', '.join(missing)}")
    unknown = [prefix + name for name in data if name not in known]
    if unknown:
        raise PlanError(f"unknown {', '.join(unknown)}; the fields are {', '.join(known)}")
    return data


def _object(name: str, data: Any) -> dict[str, Any]:
    """``data``, after a check that it is an object of JSON."""
    if not isinstance(data, dict):
        raise PlanError(f"{name} is {type(data).__name__}: give an object")
    return data


def _points(data: Any) -> Any:
    return (
        tuple(map(tuple, data))
        if isinstance(data, list) and all(isinstance(point, list) for point in data)
        else data
    )
