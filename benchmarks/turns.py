"""Variants of a step that take turns, the ratio of their times, and its interval."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from tqdm import tqdm

from autopar.profile.timing import seconds_per_call

Step = Callable[[], torch.Tensor]
Times = dict[str, list[float]]  # seconds a step, turn by turn, of each variant


def timed(step: Step, count: int, device: torch.device) -> float:
    """Seconds a step, over ``count`` of them that all ranks begin together."""
    dist.barrier()
    return seconds_per_call(step, count, device)


def take_turns(variants: Mapping[str, Callable[[], float]], repeats: int, label: str) -> Times:
    """Seconds of each variant in each turn; the order alternates."""
    times: Times = {name: [] for name in variants}
    turns = tqdm(
        range(repeats + 1),
        label,
        disable=dist.get_rank() != 0,
        leave=False,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    )
    for turn in turns:
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            took = variants[name]()
            if turn:  # the first warms up
                times[name].append(took)
    return times


def compare(times: Times, other: str, ours: str) -> dict[str, float]:
    """Medians in seconds, and of the ratio with its interval."""
    ratios = [b / a for a, b in zip(times[other], times[ours], strict=True)]
    low, high = interval(ratios)
    reference, seconds = (statistics.median(times[name]) for name in (other, ours))
    return dict(
        reference=reference, seconds=seconds, ratio=statistics.median(ratios), low=low, high=high
    )


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, from order statistics (binomial, by its normal
    approximation).
    """
    ordered = sorted(values)
    skipped = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[skipped], ordered[-1 - skipped]


def verdict(row: dict) -> str:
    if row["target"] is None:
        return ""
    if row["low"] <= row["target"] < row["high"]:
        return f"<= {row['target']:.2f}: unclear"
    return f"<= {row['target']:.2f}: {'met' if row['high'] <= row['target'] else 'missed'}"
