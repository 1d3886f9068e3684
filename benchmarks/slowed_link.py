"""How much of its communication a step hides behind what it computes, over a link that is slow on
purpose, on two ranks.

The result of a collective is delivered no earlier than a link of ``--latency`` and ``--bandwidth``
would deliver it, one message after the other. gloo needs time of its own, which is not the link's:
while a rank waits for gloo longer than for the link, the clock stands still. That takes out waits
for the other rank, too, so that a step may seem to hide more than it can. The order of a step is
recorded without the link's delays, with the time of each start and of each wait, and played again
with them. So the columns are

- step: a step over a link that takes no time,
- sent: seconds in which the link is busy in one step,
- to hide: the part that is hidden when the recorded order is played with the delays,
- hidden: that of the real step, which takes so much less longer than the link is busy; of what is
  to hide,
- exposed: by how much the real step with the delays is longer,
- predicted: by how much the plan's step is longer on a cluster with this link than on one whose
  link takes no time. The cluster is this machine's, measured before.

Steps with and without delays take turns; a row has the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from local_ranks import launch, one_thread_a_rank
from step_models import build, inputs
from step_time import backward_of
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode
from turns import take_turns, timed

import autopar
from autopar.cost_model import Cluster, Level
from autopar.ir.plan_data import BACKENDS

RANKS = 2
SLEEPS_LONGER = 1e-3  # seconds by which a sleep may be longer than asked
PLANS: dict[str, dict[str, Any]] = {
    "zero=0": dict(parallel=dict(data=RANKS), zero=0),
    "zero=2": dict(parallel=dict(data=RANKS), zero=2),
    "zero=3": dict(parallel=dict(data=RANKS), zero=3),
    "tensor, 1d": dict(parallel=dict(tensor=dict(size=RANKS, mode="1d"))),
}
# How many messages a rank sends one after the other, and the part of the first argument's bytes
# that each has, on two ranks.
MESSAGES = {
    "all_gather_into_tensor": (1, 1.0),
    "reduce_scatter_tensor": (1, 0.5),
    "all_reduce": (2, 0.5),
    "all_to_all_single": (1, 0.5),
}


class Event(NamedTuple):
    """A collective starts, or its result is waited for, at a time in seconds.

    ``busy`` and ``latency`` are the link's, in seconds, of a start; ``number`` is the collective's.
    """

    time: float
    number: int
    is_start: bool
    busy: float = 0.0
    latency: float = 0.0


class SlowLink(TorchDispatchMode):
    """Delays what collectives deliver, and records the events of a program. Its clock stands still
    while a rank waits for gloo and no longer for the link.

    Attributes:
        is_slow: whether it delays.
        events: since the last :meth:`start`, by this clock.
        stood_still: seconds that the clock has stood still since then.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        super().__init__()
        self._latency, self._bandwidth = latency, bandwidth
        self.is_slow, self.events, self.stood_still = False, list[Event](), 0.0
        self._free = 0.0  # when the link has sent all
        self._coming: dict[int, tuple[int, float]] = {}  # number and time of arrival, by address

    def start(self) -> None:
        self.events, self._coming, self.stood_still, self._free = [], {}, 0.0, 0.0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f.namespace != "_c10d_functional":
            return f(*args, **(kwargs or {}))
        name = f._schema.name.removeprefix("_c10d_functional::")
        if name == "wait_tensor":
            return self._wait(f, *args)
        began = self._now()
        out = f(*args, **(kwargs or {}))
        count, part = MESSAGES[name.removesuffix("_").removesuffix("_coalesced")]
        nbytes = sum(t.nbytes for t in (args[0] if isinstance(args[0], list) else args[:1]))
        busy, latency = count * part * nbytes / self._bandwidth, count * self._latency
        number = len(self.events)
        self.events.append(Event(began, number, True, busy, latency))
        self._free = max(self._free, began) + busy
        for t in out if isinstance(out, (list, tuple)) else [out]:
            self._coming[t.data_ptr()] = number, self._free + latency
        return out

    def _now(self) -> float:
        return time.perf_counter() - self.stood_still

    def _wait(self, f: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
        number, arrival = self._coming.pop(tensor.data_ptr(), (-1, 0.0))
        began = self._now()
        needed = max(began, arrival if self.is_slow else began)
        out = f(tensor)
        self.stood_still += max(0.0, self._now() - needed)
        if number >= 0:
            self.events.append(Event(began, number, False))
            time.sleep(max(0.0, needed - self._now() - SLEEPS_LONGER))
            while self._now() < needed:
                pass
        return out


def exposed_in_order(events: Sequence[Event]) -> float:
    """By how many seconds the order is longer when the link delays it."""
    longer, free, arrival = 0.0, 0.0, dict[int, float]()
    for event in events:
        now = event.time + longer
        if event.is_start:
            free = max(free, now) + event.busy
            arrival[event.number] = free + event.latency
        else:
            longer += max(0.0, arrival[event.number] - now)
    return longer


def _plans(
    name: str, options: argparse.Namespace, cluster: Cluster, model: torch.nn.Module, sample: Any
) -> list[autopar.Plan]:
    """The plan on a cluster with the slow link, and on one whose link takes no time."""
    slow = Level("slow", None, options.latency, options.bandwidth)
    software = replace(cluster.software, overlap=1.0)
    return [
        autopar.plan(
            model,
            sample,
            RANKS,
            cluster=replace(cluster, links=(link,), software=software),
            recompute="none",
            backend=options.backend,
            progress=False,
            **PLANS[name],
        )
        for link in (slow, replace(slow, latency=0.0, bandwidth=1e15))
    ]


def case(
    name: str, options: argparse.Namespace, cluster: Cluster, model: torch.nn.Module
) -> dict[str, Any]:
    """One plan, on each of the ranks."""
    tokens = torch.randint(
        0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)
    )
    plans = _plans(name, options, cluster, model, inputs(tokens))
    compiled = autopar.compile(model, inputs(tokens), RANKS, plan=plans[0], progress=False)
    slowed, device = SlowLink(options.latency, options.bandwidth), torch.device("cpu")
    step = backward_of(compiled, inputs(tokens))
    step()  # which inductor compiles
    found: dict[str, list[float]] = {"sent": [], "exposed": []}

    def run(is_slow: bool) -> float:
        slowed.is_slow = is_slow
        taken = []
        for _ in range(options.steps):
            slowed.start()
            taken.append(timed(step, 1, device) - slowed.stood_still)
            compiled.zero_grad()
            if not is_slow:
                found["sent"].append(sum(e.busy + e.latency for e in slowed.events))
                found["exposed"].append(exposed_in_order(slowed.events))
        return statistics.mean(taken)

    with slowed:
        times = take_turns(
            {"fast": partial(run, False), "slow": partial(run, True)}, options.repeats, name
        )
    longer = statistics.median(b - a for a, b in zip(times["fast"], times["slow"], strict=True))
    sent, exposed = (statistics.median(found[key]) for key in ("sent", "exposed"))
    return dict(
        plan=name,
        fast=statistics.median(times["fast"]),
        sent=sent,
        to_hide=sent - exposed,
        hidden=sent - longer,
        exposed=longer,
        predicted=plans[0].step_time - plans[1].step_time,
    )


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    try:
        cluster = Cluster.measure(options.out.with_name("cluster.json"))
        rows = [case(name, options, cluster, build(options)) for name in options.plans]
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    headers = (
        *("plan", "step ms", "sent ms", "to hide ms", "hidden ms", "of what is to hide"),
        *("exposed ms", "predicted ms", "off"),
    )
    cells = [
        [
            row["plan"],
            *(f"{1e3 * row[key]:.1f}" for key in ("fast", "sent", "to_hide", "hidden")),
            f"{row['hidden'] / row['to_hide']:.2f}" if row["to_hide"] > 0.01 * row["sent"] else "",
            *(f"{1e3 * row[key]:.1f}" for key in ("exposed", "predicted")),
            f"{row['predicted'] / row['exposed'] - 1:+.0%}",
        ]
        for row in rows
    ]
    return tabulate(cells, headers=headers, disable_numparse=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--latency", type=float, default=5e-4, help="of a message, in seconds")
    parser.add_argument("--bandwidth", type=float, default=1.5e8, help="in bytes a second")
    parser.add_argument("--backend", choices=BACKENDS, default="eager")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=[*PLANS])
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn")
    parser.add_argument("--repeats", type=int, default=15, help="turns with and without delays")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.out is not None:
        worker(options)
        return
    one_thread_a_rank()
    with tempfile.TemporaryDirectory() as folder:
        rows = launch(RANKS, folder, script=__file__)
    print(
        f"\n{options.model}, {options.backend}, {options.layers} layers, hidden {options.hidden}, "
        f"batch {options.batch} x {options.sequence}, float32; a link of {options.latency:g} s and "
        f"{options.bandwidth:g} B/s; forward and backward, {options.repeats} turns of "
        f"{options.steps} steps\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
