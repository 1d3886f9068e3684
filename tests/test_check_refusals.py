"""Models whose next call depends on the last one are refused by name, before training."""

from __future__ import annotations

import pytest
import torch
from checked_models import Net, checked, made
from torch import nn

import autopar
from autopar.errors import CaptureError
from autopar.frontend.traced_model import TracedModel


def counts(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.counter += 1
    return h * net.counter


def appends(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.seen.append(float(h.shape[0]))
    return h


class Schedule:
    """An object that is no module and returns the number of its calls."""

    def __init__(self) -> None:
        self.calls, self.by_kind = 0, {"all": 0}

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def counts_in_an_object(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * net.schedules[0]()


def counts_in_a_dict(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.schedules[0].by_kind["all"] += 1
    return h


def hooks_itself(net: Net, h: torch.Tensor) -> torch.Tensor:
    """Adds hooks in its forward, as models of transformers do to return inner tensors."""
    if not hasattr(net, "hooked"):
        net.hooked = net.head.register_forward_hook(lambda module, args, output: output + 1)
    return h


def caches(net: Net, h: torch.Tensor) -> torch.Tensor:
    if net.cache is None:
        net.cache = h.shape[1]
    return h * net.cache


def test_python_state_that_changes_from_call_to_call_is_refused_by_name() -> None:
    held = (
        (counts_in_an_object, r"schedules\[0\].calls"),
        (counts_in_a_dict, r"schedules\[0\].by_kind"),
    )
    for between, name in ((counts, "counter"), (appends, "seen"), *held):
        model, x = made(between)
        model.schedules = [Schedule()]
        with pytest.raises(
            CaptureError, match=rf"the forward changes {name} from call to call.*buffer"
        ):
            autopar.compile(model, x, 1, progress=False)
        assert (model.counter, model.seen, vars(model.schedules[0])) == (
            0,
            [],
            {"calls": 0, "by_kind": {"all": 0}},
        )  # as it was
        autopar.compile(model, x, 1, progress=False, verify=False)
    checked(*made(caches))
    model, x = made(hooks_itself)
    checked(model, x)
    assert not hasattr(model, "hooked")
    assert not model.head._forward_hooks


def test_a_cumulative_average_of_statistics_is_refused_with_the_reason() -> None:
    model, x = made()
    model.norm = nn.BatchNorm1d(6, momentum=None).double()
    with pytest.raises(
        CaptureError, match=r"in module norm \(BatchNorm1d\).*momentum=None.*give it a momentum"
    ):
        TracedModel(model, x, None).whole  # noqa: B018


def remembers(net: Net, h: torch.Tensor) -> torch.Tensor:
    last, net.cache = net.cache, h.detach()
    return h if last is None else h + last


def test_a_tensor_that_the_next_call_reads_is_refused_by_name() -> None:
    model, x = made(remembers)
    with pytest.raises(
        CaptureError, match="what the forward computes depends on cache, which it changes"
    ):
        autopar.compile(model, x, 1, progress=False)
