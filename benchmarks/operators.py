"""torch's own table of operators, each split in every way that its rule offers, compared with
torch.

    python benchmarks/operators.py                     # all; a later run continues operators.jsonl
    python benchmarks/operators.py --only topk sort    # some operators, anew
    python benchmarks/operators.py --ranks 0.1         # a tenth on two gloo ranks, through compile

Each float64 sample input of an operator becomes a module that multiplies every floating operand by
a weight, calls the operator, and adds up its results with fixed weights. It is captured; the
captured graph must compute what the module does, and every node of it, cut along an axis of two as
each of its strategies says, must make up the node's values and gradients (``emulate.py``). Needs
the package expecttest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from emulate import Program, Row, close, every, local, tensors_in
from tabulate import tabulate
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import autopar
from autopar.capture.capture_graph import capture
from autopar.errors import AutoparError, CaptureError
from autopar.ir.nodes import arguments
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.rules import rule_of

TOLERANCE = 1e-9
SAMPLES = 4  # of each operator, unless --samples says otherwise
SPLIT, UNSPLIT, REFUSED, NOT_EXPORTABLE, WRONG, CRASH = (
    "split",
    "unsplit",
    "refused",
    "not exportable",
    "wrong",
    "crash",
)
AROUND = {  # what the module does beside the operator
    torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.remainder.Scalar,
    torch.ops.aten.sum.dim_IntList, torch.ops.aten.reshape.default, torch.ops.aten.to.dtype,
    torch.ops.aten.view_as_real.default,
}  # fmt: skip
WORST_LAST = (NOT_EXPORTABLE, UNSPLIT, SPLIT, REFUSED, CRASH, WRONG)


class Applies(nn.Module):
    """One call of an operator as a model with a loss."""

    def __init__(self, operator: Any, arguments: tuple[Any, ...], trains: bool = True) -> None:
        """Where ``trains`` is False the operands have no gradient."""
        super().__init__()
        leaves, self.spec = tree_flatten(arguments)
        self.operator, self.leaves = (
            operator,
            [None if isinstance(a, torch.Tensor) else a for a in leaves],
        )
        self.places = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
        floating = [
            i for i in self.places if leaves[i].is_floating_point() or leaves[i].is_complex()
        ]
        floating = floating if trains else []
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.weights = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.ones_like(leaves[i], requires_grad=False))
                for i in floating
            }
        )

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = list(self.leaves)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x * self.weights[str(i)] if str(i) in self.weights else x
        args, kwargs = tree_unflatten(leaves, self.spec)
        total = (
            self.scale * 1e-3
        )  # so that there is a gradient, whatever the operator does with its operands
        for result in tensors_in(self.operator(*args, **kwargs)):
            parts = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
            total = total + (parts.to(torch.float64) * _fixed(parts)).sum() * self.scale
        return total


def _fixed(like: torch.Tensor) -> torch.Tensor:
    """Numbers between 0.5 and 1.5 that differ from place to place."""
    count = torch.arange(like.numel(), dtype=torch.float64)
    return (torch.remainder(count * 0.6180339887, 1.0) + 0.5).reshape(like.shape)


@dataclass(frozen=True)
class Case:
    """One sample input of an operator."""

    name: str
    number: int
    operator: Any
    arguments: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach() for t in tensors_in(self.arguments))

    def model(self) -> Applies:
        """It, its operands without a gradient where torch has none for them."""
        model = Applies(self.operator, self.arguments)
        try:
            _eager(model, self.tensors)
        except (RuntimeError, NotImplementedError):
            return Applies(self.operator, self.arguments, trains=False)
        return model


def cases(only: list[str], samples: int) -> Iterator[tuple[str, list[Case]]]:
    """The operators of torch's table that take float64, on a CPU too, each with its dense sample
    inputs.
    """
    for entry in op_db:
        name = f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name
        if (
            torch.float64 not in entry.dtypes
            or entry.name.startswith("jiterator")
            or (only and not {entry.name, name} & set(only))
        ):
            continue
        torch.manual_seed(0)
        random.seed(0)  # some samples are made with Python's
        try:
            # Not entry.sample_inputs: it looks up the stack's source files for each operator, which
            # takes longer than the check.
            inputs = list(entry.sample_inputs_func(entry, "cpu", torch.float64, False))
        except Exception:
            inputs = []
        found = [(s.input, *s.args) for s in inputs]
        plain = [
            Case(name, k, entry.op, (args, s.kwargs))
            for k, (args, s) in enumerate(zip(found, inputs, strict=True))
        ]
        plain = [
            c for c in plain if c.tensors and all(t.layout is torch.strided for t in c.tensors)
        ]
        picked = plain if len(plain) <= samples else random.Random(name).sample(plain, samples)
        yield name, sorted(picked, key=lambda c: c.number)


# -- One case, on ranks that are emulated


class _Values(fx.Interpreter):
    """Runs a captured graph, and keeps what each node read and made."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(nn.Module(), graph))
        self.seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self.seen[n.name] = self.fetch_args_kwargs_from_env(n)
        return super().run_node(n)


def check(case: Case, checked: set[str]) -> tuple[str, str]:
    """What becomes of a case, and the reason; ``checked`` are the calls around the operator that
    need not be checked again, to which it adds."""
    model = case.model()
    try:
        _eager(model, case.tensors)
    except Exception as e:
        return NOT_EXPORTABLE, f"not even eager: {_line(e)}"
    try:
        raw = capture(model, case.tensors)
    except CaptureError as e:
        if e.__cause__ is not None:  # export's own
            return NOT_EXPORTABLE, _line(e.__cause__)
        return REFUSED, _line(e)
    try:
        captured = canonicalise(raw)
    except AutoparError as e:
        return REFUSED, _line(e)
    loss, grads = _eager(model, case.tensors)
    tensors = {i.target: i for i in captured.inputs}
    given = iter(case.tensors)
    state = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    values = [
        next(given)
        if i.kind == "input"
        else state[i.target]
        if i.target in state
        else captured.state[i.target]
        for i in tensors.values()
    ]
    interpreter = _Values(captured.graph)
    torch.manual_seed(1)
    found = interpreter.run(*values, enable_io_processing=False)[captured.loss]
    if not _draws(captured.graph):
        close(found.detach(), loss, "captured", TOLERANCE)
        for name, grad in zip(
            state, torch.autograd.grad(found, list(state.values()), allow_unused=True), strict=True
        ):
            if (expected := grads[name]) is not None:
                grad = grad.to_dense() if grad is not None and grad.is_sparse else grad
                close(
                    grad if grad is not None else torch.zeros_like(expected),
                    expected,
                    f"captured gradient of {name}",
                    TOLERANCE,
                )
    return _split(captured.graph, interpreter.seen, checked)


def _split(graph: fx.Graph, seen: dict[str, Any], checked: set[str]) -> tuple[str, str]:
    """Each node in each of its ways; of the calls that the module itself makes each kind once."""
    without: list[str] = []
    calls = [n for n in graph.nodes if n.op == "call_function" and n.name in seen]
    for node in calls:
        rule = rule_of(node)
        if rule is None:
            without.append(str(node.target))
            continue
        if str(node.target) == "<built-in function getitem>" or _is_random(node):
            continue
        args, kwargs = tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, seen[node.name]
        )
        if node.target in AROUND:
            kind = f"{node.target} {tree_map(_kind, (args, kwargs))}"
            if kind in checked:
                continue
            checked.add(kind)
        program = Program(Row(node.target, args, kwargs, _without_gradient(node, args, kwargs)))
        for strategy in local(every(program, (2,))):
            try:
                program.check(strategy, (2,))
            except AssertionError as e:
                raise AssertionError(f"{node.target} as {strategy}: {e}") from e
    return (UNSPLIT, ", ".join(dict.fromkeys(without))) if without else (SPLIT, "")


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def _without_gradient(node: fx.Node, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Which operands torch has no derivative for."""
    tensors = tensors_in((args, kwargs))
    leaves = iter(
        t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors
    )
    values = [next(leaves) for _ in tensors]
    left = iter(values)
    given = tree_map(lambda x: next(left) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    try:
        results = [r for r in tensors_in(node.target(*given[0], **given[1])) if r.requires_grad]  # type: ignore[operator]
        wanted = [v for v in values if v.requires_grad]
        if results and wanted:
            torch.autograd.grad(
                results, wanted, [torch.ones_like(r) for r in results], allow_unused=True
            )
    except (RuntimeError, NotImplementedError):
        return tuple(range(len(tensors)))
    return ()


def _eager(
    model: nn.Module, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The loss and the gradients, of copies: an operator may write to what it is given."""
    torch.manual_seed(1)
    tensors = tuple(t.clone() for t in tensors)
    model.zero_grad()
    loss = model(*tensors)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss.detach(), {
        n: g.to_dense() if g is not None and g.is_sparse else g for n, g in grads.items()
    }


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "empty" in str(
        node.target
    )


def _draws(graph: fx.Graph) -> bool:
    return any(
        _is_random(n) and arguments(n).get("dropout_p") != 0
        for n in graph.nodes
        if n.op == "call_function"
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:160]


# -- One case, on two ranks


def on_ranks(name: str, number: int, samples: int, parallel: dict[str, Any]) -> tuple[str, str]:
    """Compiles and runs a case in this rank, and compares with eager."""
    warnings.simplefilter("ignore")
    case = next(c for _, found in cases([name], samples) for c in found if c.number == number)
    expected, grads = _eager(case.model(), case.tensors)
    try:
        draws = _draws(canonicalise(capture(case.model(), case.tensors)).graph)
        compiled = autopar.compile(case.model(), case.tensors, 2, parallel=parallel, progress=False)
    except AutoparError as e:
        return REFUSED, _line(e)
    loss = compiled(*case.tensors)
    loss.backward()
    if draws:  # a program's draws are its own
        return SPLIT, "it draws: only run"
    for key, p in compiled.named_parameters():
        if grads[key] is not None:
            found = p.grad.full_tensor() if p.grad is not None else torch.zeros_like(grads[key])  # type: ignore[union-attr, arg-type, attr-defined]
            close(found, grads[key], f"gradient of {key}", TOLERANCE)  # type: ignore[arg-type]
    close(loss.detach(), expected, "loss", TOLERANCE)
    return SPLIT, ""


# -- All of them


def judged(run: Any) -> tuple[str, str]:
    """``run()``, with what went wrong in it."""
    try:
        result: tuple[str, str] = run()
        return result
    except AssertionError as e:
        return WRONG, " ".join(str(e).split())[:300]
    except Exception as e:
        return CRASH, _line(e)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of operators; these are run anew"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator, at most")
    parser.add_argument("--limit", type=int, default=None, help="operators, at most")
    parser.add_argument("--log", type=Path, default=Path("operators.jsonl"))
    parser.add_argument(
        "--ranks",
        type=float,
        default=0.0,
        help="the part of the cases to run on two ranks through compile, too",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done = {} if arguments.only or not arguments.log.exists() else _read(arguments.log)
    if arguments.ranks:
        _run_ranks(arguments, done)
    else:
        _run_emulated(arguments, done)
    report(list(done.values()))


def _read(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (r["name"], r["number"], r["where"]): r for r in rows if r["status"] not in (WRONG, CRASH)
    }  # these are run again


def _note(
    arguments: argparse.Namespace,
    done: dict[Any, Any],
    case: Case,
    where: str,
    status: str,
    reason: str,
) -> None:
    row = {
        "name": case.name,
        "number": case.number,
        "where": where,
        "status": status,
        "reason": reason,
    }
    done[case.name, case.number, where] = row
    with arguments.log.open("a") as log:
        log.write(json.dumps(row) + "\n")
    if status in (WRONG, CRASH):
        print(f"{case.name} [{case.number}] {where}: {status}: {reason}", flush=True)


def _run_emulated(arguments: argparse.Namespace, done: dict[Any, Any]) -> None:
    checked: set[str] = set()
    for count, (_, found) in enumerate(cases(arguments.only, arguments.samples)):
        if arguments.limit is not None and count >= arguments.limit:
            break
        for case in found:
            if (case.name, case.number, "emulated") not in done:
                _note(arguments, done, case, "emulated", *judged(lambda: check(case, checked)))  # noqa: B023 - called at once


def _run_ranks(arguments: argparse.Namespace, done: dict[Any, Any]) -> None:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from pool import Pool  # type: ignore[import-not-found]

    pool = Pool(2)
    numbers = random.Random(0)
    for name, found in cases(arguments.only, arguments.samples):
        for case in found:
            picked = numbers.random() < arguments.ranks
            status = done.get((name, case.number, "emulated"), {}).get("status")
            if not picked or status in (NOT_EXPORTABLE, REFUSED):
                continue
            for where, parallel in (
                ("data", dict(data=2)),
                ("tensor", dict(tensor=dict(size=2, mode="1d"))),
            ):
                if (name, case.number, where) in done:
                    continue
                try:
                    outcome = pool.run(
                        _judged_on_ranks,
                        name,
                        case.number,
                        arguments.samples,
                        parallel,
                        timeout=120,
                    )[0]
                except Exception as e:
                    outcome = CRASH, str(e).strip().splitlines()[-1][:300]
                _note(arguments, done, case, where, *outcome)
    pool.close()


def _judged_on_ranks(*args: Any) -> tuple[str, str]:
    sys.path.append(str(Path(__file__).parent))
    from operators import on_ranks  # a name that it has in every process

    return judged(lambda: on_ranks(*args))


def report(rows: list[dict[str, Any]]) -> None:
    """The table, operator by operator: the worst of its samples counts."""
    for where in dict.fromkeys(r["where"] for r in rows):
        worst: dict[str, dict[str, Any]] = {}
        for row in (r for r in rows if r["where"] == where):
            before = worst.get(row["name"])
            if before is None or WORST_LAST.index(row["status"]) > WORST_LAST.index(
                before["status"]
            ):
                worst[row["name"]] = row
        counts = Counter(r["status"] for r in worst.values())
        samples = Counter(r["status"] for r in rows if r["where"] == where)
        exported = sum(n for status, n in counts.items() if status != NOT_EXPORTABLE)
        ran = counts[SPLIT] + counts[UNSPLIT]
        for status in (WRONG, CRASH, REFUSED, UNSPLIT, NOT_EXPORTABLE):
            names = [[name, r["reason"]] for name, r in worst.items() if r["status"] == status]
            table = tabulate(names, headers=["operator", "reason"], maxcolwidths=[40, 110])
            print(f"\n{where}: {status}\n{table}")
        lines = [[status, counts[status], samples[status]] for status in reversed(WORST_LAST)]
        print(f"\n{tabulate(lines, headers=[where, 'operators', 'samples'])}")
        print(
            f"of {exported} operators that export {ran} run: {100 * ran / max(exported, 1):.1f} %"
        )


if __name__ == "__main__":
    main()
