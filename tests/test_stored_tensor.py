"""A tensor in a file computes what a tensor in memory does, and reads what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import core_model_loading as hf

from autopar.errors import RunError
from autopar.runtime.values.pretrained.folder import stored_tensors
from autopar.runtime.values.pretrained.stored_tensor import as_stored, stored_tensor

Make = Callable[[torch.Tensor, torch.Tensor], Any]

MOVES: dict[str, Make] = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat, from the end": lambda a, b: torch.cat([a, b], -2),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "stack of a cat": lambda a, b: torch.stack([torch.cat([a, b]), torch.cat([b, a])]),
    "chunk": lambda a, b: a.chunk(2, 1)[1],
    "uneven split": lambda a, b: a.split([1, 3], 0)[1],
    "slice": lambda a, b: a[1:, -3:-1],
    "row": lambda a, b: a[-1],
    "unsqueeze": lambda a, b: a.unsqueeze(-1).squeeze(-1),
    "transpose": lambda a, b: torch.cat([a, b]).transpose(-1, 0).contiguous(),
    "permute": lambda a, b: torch.stack([a, b]).permute(2, 0, 1),
    "part of a part": lambda a, b: torch.cat([a[:, 2:], b[:, :1]], 1)[1:3].t()[:2],
    "cast": lambda a, b: a.to(torch.bfloat16),
}
COMPUTED: dict[str, Make] = {
    "reshape": lambda a, b: a.t().reshape(2, 3, 4),
    "steps": lambda a, b: a[::2],
    "arithmetic": lambda a, b: (a + b) * 2,
    "indices": lambda a, b: a[torch.tensor([3, 1])],
}


def _two(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    memory = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    save_file(memory, tmp_path / "model.safetensors")
    return memory, stored_tensors(tmp_path)


def _parts_are_equal(found: Any, expected: torch.Tensor) -> None:
    """Of every half, quarter and single element along each dim, and of the whole."""
    found = as_stored(found)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    whole = [slice(0, size) for size in expected.shape]
    assert torch.equal(found.part(tuple(whole)), expected)
    for dim, size in enumerate(expected.shape):
        for start, stop in ((0, size // 2), (size // 2, size), (size - 1, size)):
            ranges = (*whole[:dim], slice(start, stop), *whole[dim + 1 :])
            assert torch.equal(found.part(ranges), expected[ranges])


@pytest.mark.parametrize("name", [*MOVES, *COMPUTED])
@torch.no_grad()
def test_operators_compute_what_they_do_in_memory(tmp_path: Path, name: str) -> None:
    memory, stored = _two(tmp_path)
    make = (MOVES | COMPUTED)[name]
    _parts_are_equal(make(stored["a"], stored["b"]), make(memory["a"], memory["b"]))


@pytest.mark.parametrize("name", MOVES)
@torch.no_grad()
def test_no_more_is_read_than_asked_for(name: str) -> None:
    read: list[int] = []

    def part(ranges: Any) -> torch.Tensor:
        found = torch.zeros(4, 6)[ranges]
        read.append(found.numel())
        return found

    made = MOVES[name](*(stored_tensor((4, 6), torch.float32, part) for _ in range(2)))
    assert read == []
    ranges = tuple(slice(0, size // 2) for size in made.shape)
    found = made.part(ranges)
    assert sum(read) == found.numel() > 0


def test_a_file_is_not_written_to(tmp_path: Path) -> None:
    _, stored = _two(tmp_path)
    with torch.no_grad(), pytest.raises(RunError, match="would write to a tensor of a file"):
        stored["a"].mul_(2)


OPERATIONS: dict[str, Callable[[], tuple[Any, list[str], list[str]]]] = {
    "merge": lambda: (hf.MergeModulelist(dim=0), ["x"], ["y"]),
    "merge, second dim": lambda: (hf.MergeModulelist(dim=1), ["x"], ["y"]),
    "concatenate": lambda: (hf.Concatenate(dim=1), ["x"], ["y"]),
    "chunk": lambda: (hf.Chunk(dim=1), ["x"], ["y", "z"]),
    "split a list": lambda: (hf.SplitModulelist(dim=0), ["x"], ["y.*"]),
    "transpose": lambda: (hf.Transpose(0, 1), ["x"], ["y"]),
    "interleave": lambda: (hf.Interleave(dim=1), ["x"], ["y"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_conversions_of_transformers_take_stored_tensors(tmp_path: Path, name: str) -> None:
    memory, stored = _two(tmp_path)
    operation, sources, targets = OPERATIONS[name]()
    many = isinstance(operation, hf.MergeModulelist | hf.Concatenate)

    def made(tensors: Any) -> dict[str, Any]:
        given = [tensors["a"], tensors["b"]] if many else [tensors["a"]]
        with torch.no_grad():
            return operation.convert(
                {"x": given}, source_patterns=sources, target_patterns=targets, config=None
            )

    expected = made(memory)
    found = made(stored)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        _parts_are_equal(found[key], value)
