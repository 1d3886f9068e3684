"""The solver against the textbook: the same problem written anew as a mixed-integer program with PuLP, on a whole model."""

from __future__ import annotations

from dataclasses import replace

import pulp
import pytest
import zoo

from autopar.analysis import Analysis
from autopar.capture import capture
from autopar.cost_model import Cluster
from autopar.passes.canonicalise import canonicalise
from autopar.search.options import Axis, Options
from autopar.search.problem import Problem
from autopar.search.search import Search


def textbook(problem: Problem) -> float:
    """The least seconds: one binary a choice, one variable for each pair of ends of a conversion, and one for each conversion paid."""
    program = pulp.LpProblem("sharding", pulp.LpMinimize)
    every = [(v, k) for v, vertex in enumerate(problem.vertices) for k in range(len(vertex.choices))]
    x = {(v, k): program.add_variable(f"x_{v}_{k}", cat="Binary") for v, k in every}
    cost = [v.count * float(v.seconds[k]) * x[i, k] for i, v in enumerate(problem.vertices) for k in range(len(v.choices))]
    for i, v in enumerate(problem.vertices):
        program += pulp.lpSum(x[i, k] for k in range(len(v.choices))) == 1
    for g, group in enumerate(problem.groups):
        producer = problem.vertices[group.producer]
        paid: dict[tuple, pulp.LpVariable] = {}
        for v, p in group.ports:
            reader, table = problem.vertices[v], group.seconds[(v, p)]
            for s in range(len(producer.outs)):
                made = pulp.lpSum(x[group.producer, k] for k in range(len(producer.choices)) if producer.out_of[k] == s)
                for t, target in enumerate(reader.ins[p]):
                    if table[s, t] <= 0:
                        continue
                    if (s, target) not in paid:
                        paid[s, target] = program.add_variable(f"z_{g}_{len(paid)}", lowBound=0)
                        cost.append(group.count * float(table[s, t]) * paid[s, target])
                    wanted = pulp.lpSum(x[v, k] for k in range(len(reader.choices)) if reader.in_of[p][k] == t)
                    program += paid[s, target] >= made + wanted - 1
    program.setObjective(1e4 * pulp.lpSum(cost))
    assert program.solve(pulp.HiGHS(msg=False, timeLimit=60)) == pulp.LpStatusOptimal
    return float(pulp.value(program.objective)) / 1e4


@pytest.mark.parametrize("name", ["mlp", "mixer", "gpt2", "cnn"])
def test_same_optimum(name: str) -> None:
    model, sample = getattr(zoo, name)(batch=64)
    analysis = Analysis(canonicalise(capture(model, sample)))
    cpu = Cluster.load("cpu")
    quick = replace(cpu, links=tuple(replace(link, latency=1e-6, bandwidth=1e10) for link in cpu.links))
    found = Search(analysis, quick, Options(8)).run((Axis("axis0", 8),))
    split = [v.choices[k].out for v, k in zip(found.problem.vertices, found.solution.chosen, strict=True)]
    assert any(t.is_shard for layout in split for t in layout), "nothing to decide"
    assert found.solution.seconds == pytest.approx(textbook(found.problem), rel=1e-6)
