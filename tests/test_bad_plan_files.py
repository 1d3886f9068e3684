"""A damaged plan file ends with an error that names the place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bad_input import plan

from autopar import Plan, PlanError


def _damaged(text: str) -> list[tuple[str, str]]:
    """Texts made of a plan's file, each with the error that loading it gives."""
    data = json.loads(text)
    stored = {name: {"stored": "Q", "used": "I"} for name in data["parameters"]}
    return [
        (text[:200], "is no plan: JSONDecodeError"),
        ("[" * 10**5, "is no plan: RecursionError"),
        ("[1]", "is no plan"),
        ("3", "is no plan"),
        ('{"name": "cpu"}', "is no plan: it has no version"),
        (
            json.dumps({**data, "version": 99}),
            "has plan version 99, this autopar reads 6: plan again",
        ),
        (
            json.dumps({k: v for k, v in data.items() if k != "nodes"}),
            "is a damaged plan: nodes missing.*undo the edit",
        ),
        (
            json.dumps({**data, "parameters": stored}),
            "is a damaged plan: .*'Q' is no type: write I, R, P or S<dim>",
        ),
        (
            json.dumps({**data, "mesh_sizes": [3]}),
            r"is a damaged plan: .*a mesh of sizes \(3,\) .* is none of 4 ranks",
        ),
        (json.dumps({**data, "mesh_sizes": [2, 2]}), "is a damaged plan"),
        (json.dumps({**data, "extra": 1}), "is a damaged plan: extra unknown"),
    ]


def test_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    good = plan()
    good.save(path)
    assert Plan.load(path) == good
    for content, message in _damaged(path.read_text()):
        path.write_text(content)
        with pytest.raises(PlanError, match=f"plan.json {message}"):
            Plan.load(path)
    path.write_bytes(b"\x80\xff")
    with pytest.raises(PlanError, match="is no plan: UnicodeDecodeError"):
        Plan.load(path)
    for place, message in [
        (tmp_path / "none.json", "cannot read the plan '.*none.json': No such file or directory"),
        (tmp_path, "cannot read the plan '.*': Is a directory"),
        (None, "path=None: give the path of a file"),
        (3, "path=3: give the path"),
    ]:
        with pytest.raises(PlanError, match=message):
            Plan.load(place)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["plan.json"]
