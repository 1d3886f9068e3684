"""Draws the pictures of the documentation: ``python docs/pictures`` writes docs/images/*.svg."""

from __future__ import annotations

import sys
from pathlib import Path

import how_it_works  # noqa: F401 - it adds its pictures
import layouts  # noqa: F401
import pages  # noqa: F401
from picture import PICTURES


def main(folder: Path) -> None:
    """Writes every picture into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "images")
