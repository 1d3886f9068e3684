"""The command line: ``autopar profile -o cluster.json``, alone or under torchrun, and ``autopar
rehearse plan.json train.py:build``.

``autopar profile --calibrate`` measures nothing and corrects a cluster with a saved comparison.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import cleandoc
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar.cost_model import Cluster
from autopar.cost_model.cluster import PROFILE_SECONDS
from autopar.errors import AutoparError, PlanError, RunError
from autopar.plan import Plan
from autopar.runtime.measure.comparison import Comparison

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="autopar", description="An auto-parallel compiler for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    profile = _add_profile(commands)
    _add_rehearse(commands)
    given = parser.parse_args(arguments)
    if given.command == "profile" and given.cluster is not None and given.calibrate is None:
        profile.error("--cluster is what --calibrate corrects: give a comparison, or leave it out")
    try:
        given.run(given)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    return 0


def _add_profile(commands: Commands) -> argparse.ArgumentParser:
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
    profile.set_defaults(run=_profile)
    return profile


def _add_rehearse(commands: Commands) -> None:
    rehearse = commands.add_parser(
        "rehearse",
        help="run one rank of a plan, alone, on the device at hand",
        description=cleandoc(Plan.rehearse.__doc__ or "").partition("\n\nArgs:")[0],
    )
    rehearse.formatter_class = argparse.RawDescriptionHelpFormatter
    rehearse.add_argument("plan", type=Path, help="the file that Plan.save wrote")
    rehearse.add_argument(
        "builder",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments, of a file or of a module, that returns the model and "
        "the sample input of the plan, and its loss_fn if it has one: (model, sample) or (model, "
        "sample, loss_fn)",
    )
    rehearse.add_argument("--rank", type=int, default=0, help="of the plan's ranks (0)")
    rehearse.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="by default the model's; for one on the meta device a GPU where there is one",
    )
    rehearse.add_argument("--steps", type=int, default=5, help="steps to time (5)")
    rehearse.add_argument(
        "--no-progress", dest="progress", action="store_false", help="show no progress bar"
    )
    rehearse.set_defaults(run=_rehearse)


def _profile(given: argparse.Namespace) -> None:
    cluster = (
        _calibrated(given)
        if given.calibrate
        else Cluster.measure(given.output, given.device, given.progress, given.seconds)
    )
    if _is_first_rank():
        ranks = (
            "any number of ranks" if math.isinf(cluster.capacity) else f"{cluster.capacity} ranks"
        )
        print(f"{given.output}: {cluster.device.name}, {ranks}")


def _rehearse(given: argparse.Namespace) -> None:
    plan = Plan.load(given.plan)
    model, sample, loss_fn = _built(given.builder)
    how = dict(loss_fn=loss_fn, device=given.device, steps=given.steps, progress=given.progress)
    print(plan.rehearse(model, sample, given.rank, **how), end="")


def _built(name: str) -> tuple[Any, Any, Any]:
    """The model, the sample and the loss function (None: there is none) that the function ``name``
    returns, FILE.py:FUNCTION or MODULE:FUNCTION. Raises RunError where there is no such function.
    """
    place, _, function = name.rpartition(":")
    try:
        build = getattr(_module(place), function, None)
    except (ImportError, OSError, ValueError) as e:
        raise RunError(f"{name!r}: {place!r} cannot be imported: {e}") from e
    if not callable(build):
        raise RunError(f"{name!r} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION")
    built = build()
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise RunError(
            f"{name!r} returned a {type(built).__name__}: return (model, sample) or (model, "
            "sample, loss_fn)"
        )
    model, sample, *loss_fn = built
    return model, sample, next(iter(loss_fn), None)


def _module(place: str) -> ModuleType:
    """The module of a file, or with a name, as Python itself would run it from here."""
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return import_module(place)
    sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
    spec = spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
