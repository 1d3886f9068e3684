"""Attention drops a mask that is causal, or true everywhere, and keeps every other mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zoo
from canonical_graphs import assert_function_kept, canonical
from torch import nn

from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import arguments

Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LENGTH = 4

# Of query positions [1, 1, S, 1] and key positions [1, 1, 1, S].
CAUSAL: dict[str, Mask] = {
    "le": lambda q, k: k <= q,
    "ge": lambda q, k: q >= k,
    "lt": lambda q, k: k < q + 1,
    "gt": lambda q, k: q * 2 + 1 > k * 2,
    "and true": lambda q, k: (k <= q) & torch.ones((), dtype=torch.bool),
    "one sequence": lambda q, k: (k <= q) & (k * 0 == q * 0),
    "wide window": lambda q, k: (k <= q) & (k > q - LENGTH),
    "expanded": lambda q, k: (k <= q).expand(2, 1, LENGTH, LENGTH),
}
ALL_TRUE: dict[str, Mask] = {
    "positions": lambda q, k: (k >= 0).expand(2, 1, LENGTH, LENGTH),
    "both": lambda q, k: k < q + LENGTH,
}
OTHER: dict[str, Mask] = {
    "also itself and the next": lambda q, k: k <= q + 1,
    "window": lambda q, k: (k <= q) & (k > q - 2),
    "two sequences": lambda q, k: (k <= q) & ((k < 2) == (q < 2)),
    "diagonal": lambda q, k: k == q,
    "reversed": lambda q, k: k >= q,
    "gap": lambda q, k: (k <= q) & (k != 1),
    "repeated positions": lambda q, k: torch.div(k, 2, rounding_mode="floor") <= q,
}


def attention(mask: Mask) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention of ``x`` [2, S, 6] to itself."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH)
        q, k = positions.view(1, 1, -1, 1), positions.view(1, 1, 1, -1)
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=mask(q, k))

    return attend


def kinds(captured: CapturedModel) -> set[tuple[bool, bool]]:
    """For each attention of a graph: whether it has a mask, and whether it is causal."""
    nodes = [n for n in captured.graph.nodes if "dot_product" in str(n.target)]
    given = [arguments(n) for n in nodes]
    return {(each["attn_mask"] is not None, bool(each["is_causal"])) for each in given}


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        *(pytest.param(m, (False, True), id=name) for name, m in CAUSAL.items()),
        *(pytest.param(m, (False, False), id=name) for name, m in ALL_TRUE.items()),
        *(pytest.param(m, (True, False), id=name) for name, m in OTHER.items()),
    ],
)
def test_masks_of_positions(mask: Mask, kind: tuple[bool, bool]) -> None:
    # assert_function_kept compares values and gradients with the function's own.
    captured = assert_function_kept(attention(mask))
    assert kinds(captured) == {kind}


class Masked(nn.Module):
    """Attention with a mask that is an input, and causal."""

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH)
        mask = (positions <= positions[:, None]) & allowed
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()


def test_a_mask_of_an_input_stays() -> None:
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    captured = canonical(Masked(), torch.randn(2, LENGTH, 6, requires_grad=True), allowed)
    assert kinds(captured) == {(True, False)}


def test_more_keys_than_queries() -> None:
    """Torch counts a causal mask from the first key, so the mask of a cache of keys stays."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k = torch.arange(2, LENGTH), torch.arange(LENGTH)
        return F.scaled_dot_product_attention(x[:, 2:], x, x, attn_mask=k <= q[:, None])

    assert kinds(assert_function_kept(attend)) == {(True, False)}


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama, zoo.qwen3, zoo.mixtral])
def test_decoders_of_transformers(make: Callable[..., zoo.Made]) -> None:
    model, sample = make()
    assert kinds(canonical(model, sample)) == {(False, True)}


def test_a_plan_is_made_where_new_tensors_have_no_memory() -> None:
    with torch.device("meta"):
        model, sample = zoo.llama()
        inside = canonical(model, sample)
    assert kinds(inside) == {(False, True)}
    assert inside.fingerprint == canonical(model, sample).fingerprint
