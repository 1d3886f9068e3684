"""The plans of earlier processes, as files in the user's cache folder, where the environment
variable AUTOPAR_KEEP_PLANS is 1.

A file is JSON: data that is checked like any plan's file, and never code. Its name is a key of all
that the plan depends on: the graph, the options, the cluster, torch's settings, the versions of
what searches, and autopar's own code. It is written as a whole or not at all, so that several
processes may write and read at a time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.capture.process_state import torch_settings
from autopar.cost_model import Cluster
from autopar.cost_model.cluster_data import as_data
from autopar.errors import PlanError
from autopar.formatting.files import write_json
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import result_tensors
from autopar.ir.plan_data import VERSION
from autopar.ir.plan_json import from_json_data, to_json_data
from autopar.ir.schedules import registered_order
from autopar.plan import Plan
from autopar.profile.missing_kernels import cache_path
from autopar.rules.registry import operator_name, registered_makers
from autopar.search.space.modes.registry import registered_modes
from autopar.search.space.options import Options

SWITCH = "AUTOPAR_KEEP_PLANS"
MOST_FILES = 256  # the files that were not used for longest go first
_LIBRARIES = ("torch", "numpy", "scipy", "highspy")
_PACKAGES = ("autopar", "autopar.passes", "autopar.cost_model")
_OPERATORS = ("aten", "prims")


class PlanFile:
    """The file of one plan."""

    def __init__(self, key: str) -> None:
        self.key, self.path = key, cache_path().parent / "plans" / f"{key}.json"

    def read(self) -> Plan | None:
        """The plan; None where there is no such file, or no plan in it, with a warning."""
        try:
            plan = self._plan()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as e:
            self.refuse(f"it cannot be read: {e}")
            return None
        except (ValueError, KeyError, TypeError, RecursionError, PlanError) as e:
            self.refuse(f"it is no plan of this call: {e!r:.200}")
            return None
        with suppress(OSError):  # a folder of somebody else may be for reading alone
            os.utime(self.path)
        return plan

    def _plan(self) -> Plan:
        data = json.loads(self.path.read_text(encoding="utf-8"))
        if (data["version"], data["key"]) != (VERSION, self.key):
            raise ValueError("it is the file of something else")
        if data["digest"] != _digest(data["plan"]):
            raise ValueError("it is damaged")
        return from_json_data(data["plan"], Plan)

    def refuse(self, reason: str) -> None:
        """Warns that the file is not used."""
        warnings.warn(f"{self.path} is not used, {reason}; the search runs again", stacklevel=2)

    def write(self, plan: Plan) -> None:
        """Writes the plan. Where that is not possible, a warning says so, and the plan is not
        kept.
        """
        data = to_json_data(plan)
        kept = {"version": VERSION, "key": self.key, "digest": _digest(data), "plan": data}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, kept)
            files = sorted(self.path.parent.glob("*.json"), key=_last_use)
            for old in files[:-MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as e:
            warnings.warn(f"{self.path} cannot be written, {e}: {SWITCH}=0", stacklevel=2)


def plan_file(captured: CapturedModel, cluster: Cluster, options: Options) -> PlanFile | None:
    """The file for the plan of a graph; None where none is asked for, or where the plan depends on
    code or measurements that no key can have.
    """
    asked = os.environ.get(SWITCH, "0")
    if asked not in ("0", "1"):
        raise PlanError(f"the environment has {SWITCH}={asked!r}: set it to 0 or 1")
    known = (_is_known(n) for n in captured.graph.nodes)
    if asked == "0" or options.profile_missing or registered_order(options.schedule) is not None:
        return None
    if not (_are_rules_own() and all(known)):
        return None
    parts = [
        *(_described(n) for n in captured.graph.nodes),
        repr((captured.inputs, captured.in_spec, captured.out_spec, captured.loss)),
        repr((captured.updates, captured.aliases, captured.notes, captured.compute_dtype)),
        repr([(name, t.shape, t.dtype, t.requires_grad) for name, t in captured.state.items()]),
        json.dumps(as_data(cluster)),
        repr((options, torch_settings(), [version(name) for name in _LIBRARIES], sys.version)),
        _code(),
    ]
    return PlanFile(hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32])


def _is_known(node: fx.Node) -> bool:
    """Whether a node's name says what it computes. That of a user's operator does not."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _OPERATORS
    return _is_own(node.target) or getattr(node.target, "__module__", "") == "_operator"


def _are_rules_own() -> bool:
    """Whether all rules and modes are those of autopar: a user's have code of their own."""
    return all(map(_is_own, (*registered_makers().values(), *registered_modes().values())))


def _is_own(code: Any) -> bool:
    return str(getattr(code, "__module__", "")).startswith("autopar.")


def _described(node: fx.Node) -> str:
    """All that planning reads of a node."""
    kinds = [
        (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in result_tensors(node)
    ]
    meta = {key: value for key, value in node.meta.items() if key != "val"}
    is_operator = isinstance(node.target, (str, torch._ops.OpOverload))
    target = node.target if is_operator else operator_name(node.target)
    return f"{node.name} {node.op} {target} {node.args} {node.kwargs} {kinds} {meta}"


def _last_use(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return 0.0


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A digest of autopar's own code."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        folder = Path(str(importlib.import_module(package).__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()
