"""The command line: ``autopar profile -o cluster.json``, alone or under torchrun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.cost_model import Cluster
from autopar.errors import AutoparError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="autopar", description="An auto-parallel compiler for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    profile = commands.add_parser("profile", help="measure this machine into a cluster file", description=Cluster.measure.__doc__)
    profile.formatter_class = argparse.RawDescriptionHelpFormatter
    profile.add_argument("-o", "--output", type=Path, default=Path("cluster.json"), help="the file to write (cluster.json)")
    profile.add_argument("--device", choices=("cpu", "cuda"), help="what to measure; a GPU where there is one")
    profile.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bar")
    given = parser.parse_args(arguments)
    try:
        cluster = Cluster.measure(given.output, device=given.device, progress=given.progress)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    print(f"{given.output}: {cluster.device.name}, {cluster.capacity} ranks" if _first() else "", end="\n" if _first() else "")
    return 0


def _first() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
