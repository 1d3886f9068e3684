"""One call turns a single-device PyTorch model into a distributed training program."""

from autopar.api import compile, plan
from autopar.cost_model import Cluster
from autopar.errors import AutoparError, CaptureError, PlanError, RunError
from autopar.plan import Plan
from autopar.report.compare import Comparison
from autopar.rules import register_rule
from autopar.runtime.clip import clip_grad_norm_
from autopar.runtime.program import Compiled
from autopar.sweep import Sweep, sweep

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "Comparison",
    "Compiled",
    "Plan",
    "PlanError",
    "RunError",
    "Sweep",
    "clip_grad_norm_",
    "compile",
    "plan",
    "register_rule",
    "sweep",
]
