"""One call turns a single-device PyTorch model into a distributed training program.

This package exports the public names. Reading order of its files: ``api`` has ``plan`` and
``compile`` as lists of steps, ``plan`` the plan, ``check``, ``sweep``, ``compare_modes``,
``rehearse`` and ``reserved_memory`` the further calls, ``cli`` the command line, and ``errors`` the
exceptions.
"""

from autopar.api import compile, plan
from autopar.check import Checked, check
from autopar.compare_modes import Modes, compare_modes
from autopar.cost_model import Cluster
from autopar.cost_model.caching_allocator import AllocatorStatistics
from autopar.errors import (
    AutoparError,
    BudgetError,
    CaptureError,
    CheckpointError,
    PlanError,
    RunError,
)
from autopar.ir.schedules import Action, register_schedule
from autopar.plan import Plan
from autopar.rules import Option, register_rule
from autopar.runtime.checkpoint.files.folder import newest_checkpoint
from autopar.runtime.communication.all_ranks import on_any_rank
from autopar.runtime.measure.comparison import Comparison
from autopar.runtime.measure.rehearsal import Rehearsal
from autopar.runtime.module.compiled import Compiled
from autopar.runtime.optimizer.gradient_clipping import clip_grad_norm_
from autopar.runtime.optimizer.loss_scaler import LossScaler
from autopar.runtime.parameters.gradient_handlers import (
    GradientHandler,
    ParameterGradient,
    register_gradient_handler,
)
from autopar.search.space.modes.mode import Mode, Operation
from autopar.search.space.modes.registry import register_mode
from autopar.sweep import Sweep, sweep

__all__ = [
    "Action",
    "AllocatorStatistics",
    "AutoparError",
    "BudgetError",
    "CaptureError",
    "Checked",
    "CheckpointError",
    "Cluster",
    "Comparison",
    "Compiled",
    "GradientHandler",
    "LossScaler",
    "Mode",
    "Modes",
    "Operation",
    "Option",
    "ParameterGradient",
    "Plan",
    "PlanError",
    "Rehearsal",
    "RunError",
    "Sweep",
    "check",
    "clip_grad_norm_",
    "compare_modes",
    "compile",
    "newest_checkpoint",
    "on_any_rank",
    "plan",
    "register_gradient_handler",
    "register_mode",
    "register_rule",
    "register_schedule",
    "sweep",
]
