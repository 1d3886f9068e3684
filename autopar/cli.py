"""The command line: ``autopar profile -o cluster.json``, alone or under torchrun.

With ``--calibrate`` the command measures nothing and corrects a cluster with a saved comparison.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.cost_model import Cluster
from autopar.cost_model.cluster import PROFILE_SECONDS
from autopar.errors import AutoparError, PlanError
from autopar.runtime.measure.comparison import Comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser, profile = _parsers()
    given = parser.parse_args(arguments)
    if given.cluster is not None and given.calibrate is None:
        profile.error("--cluster is what --calibrate corrects: give a comparison, or leave it out")
    try:
        cluster = (
            _calibrated(given)
            if given.calibrate
            else Cluster.measure(given.output, given.device, given.progress, given.seconds)
        )
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    if _is_first_rank():
        ranks = (
            "any number of ranks" if math.isinf(cluster.capacity) else f"{cluster.capacity} ranks"
        )
        print(f"{given.output}: {cluster.device.name}, {ranks}")
    return 0


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the command line, and the parser of the command ``profile``."""
    parser = argparse.ArgumentParser(
        prog="autopar", description="An auto-parallel compiler for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    profile = commands.add_parser(
        "profile",
        help="measure this machine into a cluster file",
        description=Cluster.measure.__doc__,
    )
    profile.formatter_class = argparse.RawDescriptionHelpFormatter
    default = Path("cluster.json")
    profile.add_argument(
        "-o", "--output", type=Path, default=default, help=f"the file to write ({default})"
    )
    profile.add_argument(
        "--device", choices=("cpu", "cuda"), help="what to measure; a GPU where there is one"
    )
    profile.add_argument(
        "--seconds",
        type=float,
        default=PROFILE_SECONDS,
        help=f"the time to measure for ({PROFILE_SECONDS:.0f}); less leaves out large operands, "
        "then other dtypes",
    )
    profile.add_argument(
        "--no-progress", dest="progress", action="store_false", help="show no progress bar"
    )
    profile.add_argument(
        "--calibrate",
        type=Path,
        metavar="COMPARISON",
        help="measure nothing: correct a cluster by a saved compare()",
    )
    profile.add_argument(
        "--cluster",
        help="with --calibrate: what the plan was for, a preset's name or a file (the name in the "
        "plan)",
    )
    return parser, profile


def _calibrated(given: argparse.Namespace) -> Cluster:
    """Corrects a cluster with a saved comparison, and writes it."""
    comparison = Comparison.load(given.calibrate)
    preset = comparison.cluster.partition(":")[0]  # before the name of the software
    if given.cluster is None and preset not in Cluster.presets():
        known = f"the plan was for cluster {comparison.cluster!r}, which is no preset"
        raise PlanError(
            f"{known}: give its file with --cluster, such as --cluster {comparison.cluster}.json"
        )
    cluster = Cluster.load(given.cluster or comparison.cluster).calibrated(
        comparison, given.output.stem
    )
    cluster.save(given.output)
    return cluster


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
