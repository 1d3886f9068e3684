"""Checks the arguments of ``compile``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path

from autopar.capture.hooks import check_no_gradients
from autopar.errors import PlanError, RunError
from autopar.frontend.planner import check_option_names, check_sample
from autopar.frontend.traced_model import TracedModel
from autopar.ir.plan_json import validated_plan
from autopar.plan import Plan
from autopar.runtime.communication.rank_device import same_device
from autopar.search.space.options import Options


def check_arguments(
    world_size: int,
    device: torch.device,
    traced: TracedModel,
    plan: Plan | None,
    options: dict[str, Any],
) -> None:
    """Raises an error for arguments that are wrong, before anything is traced."""
    if torch.is_inference_mode_enabled():
        raise RunError(
            "compile was called under torch.inference_mode(), where parameters are made that "
            "cannot train: call it outside"
        )
    if plan is not None:
        validated_plan(plan, Plan)
    ranks = dist.get_world_size()
    if ranks != world_size:
        raise RunError(
            f"compile was asked for world_size={world_size}, the process group has {ranks} ranks: "
            f"pass world_size={ranks}"
        )
    if plan is not None and plan.world_size != world_size:
        raise RunError(
            f"the plan is for world_size={plan.world_size}, compile was asked for {world_size}: "
            f"plan again for {world_size}"
        )
    if plan is None:
        Options(world_size, **check_option_names(options))
        check_sample(traced.sample)
    if plan is not None and options:
        unused = ", ".join(sorted(options))
        raise PlanError(
            f"plan= decides everything, so {unused} would have no effect: give the options to "
            "autopar.plan"
        )
    check_no_gradients(traced.model)
    if device.type != "meta":
        _check_device(traced.sample, device)


def _check_device(sample: Any, device: torch.device) -> None:
    """Raises :class:`RunError` for a tensor of the sample that is not on the model's device."""
    for path, leaf in tree_flatten_with_path(sample)[0]:
        if isinstance(leaf, torch.Tensor) and not same_device(leaf.device, device):
            place = f"sample_input{keystr(path)} is on {leaf.device}, the model on {device}"
            raise RunError(
                f"{place}: a batch must lie where the model does, so pass it .to({str(device)!r})"
            )
