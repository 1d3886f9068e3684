"""How long compile(verify=True) compares model and graph, in training steps of one device."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from tabulate import tabulate

from autopar.frontend.traced_model import TracedModel
from autopar.verification.few_samples import compare
from autopar.verification.whole_batch import check_captured

SHAPES = {
    "4 layers of 128, 8 x 64 tokens": (4, 128, 8, 64),
    "GPT-2 small, 8 x 128 tokens": (12, 768, 8, 128),
}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median, after one call that does not count."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def row(layers: int, width: int, samples: int, tokens: int, repeats: int) -> tuple[str, ...]:
    """Seconds of a step, and the comparisons' in steps."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(config.vocab_size, (samples, tokens))
    sample = {"input_ids": ids, "labels": ids.clone()}
    traced, optimizer = TracedModel(model, sample, None), torch.optim.AdamW(model.parameters())
    analysis, _ = traced.analyse(1)

    def step() -> None:
        model(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one = seconds(step, repeats)
    few = seconds(lambda: compare(analysis, model, traced.sample, None), repeats)
    whole = seconds(lambda: check_captured(traced.whole, model, traced.sample, None), repeats)
    return f"{one:.3f} s", f"{few / one:.2f}", f"{whole / one:.2f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    rows = [(name, *row(*shape, repeats)) for name, shape in SHAPES.items()]
    print(
        tabulate(
            rows,
            ("GPT-2", "training step", "few samples, in steps", "whole batch, in steps"),
            disable_numparse=True,
        )
    )


if __name__ == "__main__":
    main()
