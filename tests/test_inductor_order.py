"""In which order compiled programs of several ranks compute and communicate: sums of gradients run
beside products.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import equivalence
import pytest
import zoo
from test_inductor import RATE, both, compilations, train, worst
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost_model import Cluster, Level
from autopar.runtime.parameters.gradients import GradientSync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_equal_blocks_are_compiled_once_and_their_gradients_leave(
    tmp_path: Path, ranks: Any
) -> None:
    ranks(2).run(by_blocks, tmp_path, timeout=600)


class Order(TorchDispatchMode):
    """Counts the matrix products before and after the first all-reduce of gradients begins."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = 0
        self._has_begun = False

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f.__name__.partition(".")[0]
        self._has_begun |= name == "all_reduce_"
        if name in ("mm", "addmm"):
            self.before += not self._has_begun
            self.after += self._has_begun
        return f(*args, **(kwargs or {}))


def by_blocks(folder: Path) -> None:
    layers = 4
    made = zoo.gpt2(layers=layers, dropout=RATE)
    small_buckets = (GradientSync.__init__.__kwdefaults__ or {}) | {"bucket_bytes": 1 << 14}
    with mock.patch.object(GradientSync.__init__, "__kwdefaults__", small_buckets):
        _, (eager, compiled) = both(made, 2, folder, parallel=dict(data=2), zero=0)
    assert worst(train(compiled, made[1]), train(eager, made[1])) < (1e-5, "")
    assert compilations(compiled) == 3
    loss = equivalence.loss_of(compiled(**made[1]))
    with Order() as order:
        loss.backward()
    # The sums of the last block's gradients begin before the products of the others.
    assert order.after >= 0.7 * (order.before + order.after) > 4 * layers


class Beside(TorchDispatchMode):
    """Records how many matrix products run between the start of each sum and the wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self._running: dict[int, int] = {}

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f.__name__.partition(".")[0]
        if name == "mm":
            self._running = {key: count + 1 for key, count in self._running.items()}
        elif name == "wait_tensor" and args[0].data_ptr() in self._running:
            self.counts.append(self._running.pop(args[0].data_ptr()))
        result = f(*args, **(kwargs or {}))
        if name == "all_reduce_":
            self._running[result.data_ptr()] = 0
        return result


@pytest.mark.parametrize("stream", ["I", "R"])
def test_gradients_of_weights_hide_the_sums_of_a_backward(
    stream: str, tmp_path: Path, ranks: Any
) -> None:
    ranks(2).run(beside, tmp_path, stream, timeout=600)


def beside(folder: Path, stream: str) -> None:
    layers = 3
    made = zoo.gpt2(layers=layers)
    between = {f"transformer.h.{i}.ln_{j}": stream for i in range(layers) for j in (1, 2)}
    options = dict(parallel=dict(tensor=dict(size=2, mode="1d")), zero=0, constraints=between)
    _, (eager, compiled) = both(made, 2, folder, **options)
    assert worst(train(compiled, made[1]), train(eager, made[1])) < (1e-5, "")
    counts = dict[str, list[int]]()
    for name, program in (("eager", eager), ("compiled", compiled)):
        loss = equivalence.loss_of(program(**made[1]))
        with Beside() as beside:
            loss.backward()
        counts[name] = beside.counts
    # Two linear layers of each block read what lies whole on the ranks.
    assert sum(counts["eager"]) == 0
    assert sum(count > 0 for count in counts["compiled"]) >= {"I": 2, "R": 1}[stream] * (layers - 1)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_sums_of_weights_in_the_graph_run_to_the_end_of_their_block(
    model: str, tmp_path: Path, ranks: Any
) -> None:
    """Of weights that a linear layer reads, and of those that it reads transposed."""
    ranks(2).run(weight_sums, tmp_path, model, timeout=600)


def weight_sums(folder: Path, model: str) -> None:
    layers = 3
    made = getattr(zoo, model)(layers=layers)
    found = Cluster.load("cpu")
    cluster = dataclasses.replace(
        found,
        links=(Level("without latency", None, 0.0, 1e10),),
        software=dataclasses.replace(found.software, overlap=1.0),
    )
    options = dict(parallel=dict(data=2), zero=0, backend="inductor", cluster=cluster)
    plan, (eager, compiled) = both(made, 2, folder, **options)
    found = [r for r in plan.rows["collectives"] if (r[0], r[3]) == ("conversions", "backward")]
    assert sum(row[6] for row in found) >= 4 * layers  # weights whose gradients the graph sums
    assert worst(train(compiled, made[1]), train(eager, made[1])) < (1e-5, "")
    loss = equivalence.loss_of(compiled(**made[1]))
    with Beside() as beside:
        loss.backward()
    # Beside each is at least the product for the gradient of its layer's operand.
    assert sum(count > 0 for count in beside.counts) >= 4 * layers
    # Beside the first of a block are the products of all layers before.
    assert sum(count >= 6 for count in beside.counts) >= layers
