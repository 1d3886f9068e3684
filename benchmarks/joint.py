"""What it brings to decide sharding and recomputation together: against the best sharding first,
then the best recomputation for it.

The models, batches, devices and meshes are those of table 1 of arXiv 2104.04473 (Megatron-LM), with
microbatches so large that memory binds. Both plans are predictions for the same cluster, under the
same budgets. First and then: every node and parameter is sharded as in the fastest plan where
memory is free, and only what is recomputed is chosen under the budget (and the stage cuts, anew). A
plan counts for all budgets that it fits, so that neither column gets worse where there is more
memory.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from planning_rows import build
from tabulate import tabulate
from tqdm import tqdm

from autopar.cost_model import Cluster, MeshLinks, Pace
from autopar.errors import BudgetError
from autopar.frontend.traced_model import TracedModel
from autopar.rules.analysis import Analysis
from autopar.search.ilp.neighbourhood import restrict_choices, strategies_as_chosen
from autopar.search.ilp.problem import Problem
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.outer_search import OuterSearch
from autopar.search.pricing.step_prices import StepPrices
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Options

VOCABULARY, SEQUENCE = 51200, 2048
UNLIMITED = 1e9  # GB


@dataclass(frozen=True)
class Case:
    """A GPT, the devices of a published run and their mesh; ``micro`` samples in a microbatch of a
    replica.
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    data: int
    tensor: int
    pipeline: int
    micro: int

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def schedule(self) -> str | None:
        """The same for both, so that they differ in nothing else."""
        return "1f1b" if self.pipeline > 1 else None

    def __str__(self) -> str:
        axes = f"data {self.data} x tensor {self.tensor}" + f" x pipeline {self.pipeline}" * (
            self.pipeline > 1
        )
        return f"{axes}, {self.batch // self.data // self.micro} microbatches of {self.micro}"


CASES = {
    "gpt-18b": Case(40, 6144, 48, 1024, data=32, tensor=8, pipeline=1, micro=16),
    "gpt-39b": Case(48, 8192, 64, 1536, data=32, tensor=8, pipeline=2, micro=8),
    "gpt-76b": Case(60, 10240, 80, 1792, data=32, tensor=8, pipeline=4, micro=4),
    "gpt-145b": Case(80, 12288, 96, 2304, data=24, tensor=8, pipeline=8, micro=4),
}


class Sharded(InnerSearch):
    """A search in which every node is sharded as in the fastest plan where memory is free."""

    def __init__(self, free: InnerSearch, options: Options) -> None:
        super().__init__(free.analysis, free.cluster, options)
        self._free = free

    def problem(
        self,
        configuration: Configuration,
        samples: int,
        pace: Pace | None = None,
        step_prices: StepPrices | None = None,
        links: MeshLinks | None = None,
    ) -> Problem:
        return self.cache.problems.of(
            (configuration, samples, step_prices),
            lambda: self._sharded(configuration, samples, step_prices),
        )

    def _sharded(
        self, shape: Configuration, samples: int, step_prices: StepPrices | None
    ) -> Problem:
        free, fastest = (
            self._free.problem(shape, samples, step_prices=step_prices),
            self._free.prices(shape, samples).at(0.0),
        )
        return restrict_choices(free, strategies_as_chosen(free, fastest.chosen))


class Given(InnerSearches):
    """A search that is there already."""

    def __init__(self, search: InnerSearch, samples: int) -> None:
        super().__init__(
            lambda microbatches: search.cache, samples, search.options, lambda what: None
        )
        self._search = search

    def of(self, microbatches: int) -> InnerSearch:
        return self._search


def searches(
    name: str, cluster: Cluster, budget: float, analysis: Analysis
) -> Iterator[InnerSearch]:
    """That of both together, and that of recomputation alone."""
    case = CASES[name]
    parallel = dict(
        data=case.data, pipeline=case.pipeline, tensor=dict(size=case.tensor, mode="1d")
    )
    options = Options(
        case.devices,
        parallel=parallel,
        micro_batch_size=case.micro,
        memory_budget=budget,
        schedule=case.schedule,
    )
    yield InnerSearch(analysis, cluster, options)
    yield Sharded(InnerSearch(analysis, cluster, options), options)


def plan(search: InnerSearch, samples: int) -> PricedPlan | BudgetError:
    try:
        return OuterSearch(Given(search, samples)).run().plan
    except BudgetError as e:
        return e


def rows(name: str, cluster: Cluster, budgets: list[float]) -> Iterator[tuple[str, ...]]:
    """Of each budget, in GB, the smallest first; at the end where memory is free."""
    case = CASES[name]
    sizes = dict(
        n_layer=case.layers,
        n_embd=case.hidden,
        n_head=case.heads,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
    )
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model, sample = build("GPT2", sizes | off, case.batch, SEQUENCE)
    analysis = TracedModel(model, sample, None).analyse(case.batch // case.data // case.micro)[0]
    joint: PricedPlan | BudgetError | None = None
    apart: PricedPlan | BudgetError | None = None
    for budget in [*sorted(budgets), UNLIMITED]:
        both, alone = (
            plan(search, case.batch) for search in searches(name, cluster, 1e9 * budget, analysis)
        )
        joint, apart = (better(old, new) for old, new in ((joint, both), (apart, alone)))
        ratio = (
            f"{seconds(apart) / seconds(joint):.3f}"
            if math.isfinite(seconds(joint) + seconds(apart))
            else ""
        )
        yield (
            name,
            str(case),
            "free" if budget == UNLIMITED else f"{budget:g}",
            shown(joint),
            shown(apart),
            ratio,
        )


def better(
    old: PricedPlan | BudgetError | None, new: PricedPlan | BudgetError
) -> PricedPlan | BudgetError:
    return new if old is None or seconds(new) <= seconds(old) else old


def seconds(found: PricedPlan | BudgetError) -> float:
    return found.seconds if isinstance(found, PricedPlan) else math.inf


def shown(found: PricedPlan | BudgetError) -> str:
    if isinstance(found, BudgetError):
        return f"needs {found.least / 1e9:.1f} GB"
    return f"{seconds(found):.3f} ({max(found.device_bytes()) / 1e9:.1f} GB)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="NAME",
        help=", ".join(CASES),
    )
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=[80.0, 60.0, 40.0, 30.0], help="GB a device"
    )
    parser.add_argument("--cluster", default="a100-sxm")
    options = parser.parse_args()
    cluster = Cluster.load(options.cluster)
    found = [
        row
        for name in tqdm(options.cases, "planning", leave=False)
        for row in reversed(list(rows(name, cluster, options.budgets)))
    ]
    headers = ("model", "mesh", "budget GB", "together s", "first and then s", "ratio")
    print(
        f"{options.cluster}, bf16, AdamW, sequence "
        f"{SEQUENCE}\n\n{tabulate(found, headers=headers, disable_numparse=True)}"
    )


if __name__ == "__main__":
    main()
