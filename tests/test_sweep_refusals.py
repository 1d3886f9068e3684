"""Wrong configurations of a sweep are refused before the model is traced."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import PlanError
from autopar.frontend import traced_model as tracing

GOOD = dict(world_size=2)


@pytest.mark.parametrize(
    ("configurations", "options", "message"),
    [
        ([], {}, r"configurations is empty: give one dict"),
        (dict(world_size=2), {}, r"configurations=\{'world_size': 2\}: give a list of dicts"),
        (4, {}, r"configurations=4: give a list of dicts"),
        ([GOOD, 4], {}, r"configurations\[1\] is 4: give a dict of options"),
        (
            [GOOD, dict(zero=1)],
            {},
            r"configurations\[1\] has no world_size: say for how many devices",
        ),
        (
            [GOOD, GOOD, dict(GOOD, tensor=2)],
            {},
            r"configurations\[2\] has an unknown option tensor: the options are parallel, mesh",
        ),
        ([GOOD, {**GOOD, 3: 4}], {}, r"configurations\[1\] has an unknown option 3:"),
        ([dict(GOOD, loss_fn=len)], {}, r"configurations\[0\] has an unknown option loss_fn"),
        ([GOOD], dict(zeros=1), r"configurations\[0\] has an unknown option zeros"),
        ([GOOD], dict(cluster="h1000"), r"h1000"),
        ([GOOD], dict(cluster=None), r"the model is on meta: say what it will train on"),
    ],
)
def test_what_is_refused_before_anything_is_traced(
    configurations: Any, options: dict[str, Any], message: str
) -> None:
    with torch.device("meta"):
        small = nn.Linear(2, 2)
    with (
        mock.patch.object(tracing, "_trace", side_effect=AssertionError("traced")),
        pytest.raises(PlanError, match=message),
    ):
        autopar.sweep(
            small,
            torch.empty(4, 2),
            configurations,
            progress=False,
            **{"cluster": "h100-sxm", **options},
        )


def test_a_model_that_cannot_be_traced_is_no_entry() -> None:
    with pytest.raises(autopar.CaptureError, match="loss"):
        autopar.sweep(nn.Linear(2, 2), torch.empty(4, 2), [GOOD], progress=False)
