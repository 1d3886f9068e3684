"""The packages that an installation has are the packages of the source tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {"autopar": "autopar", "cost_model": "autopar.cost_model", "passes": "autopar.passes"}


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^packages = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    found = set()
    for folder, package in PLACES.items():
        for file in (ROOT / folder).rglob("__init__.py"):
            parts = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *parts)))
    assert found == set(re.findall(r'"(.*?)"', listed[1]))
