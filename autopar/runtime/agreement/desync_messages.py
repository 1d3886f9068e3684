"""The errors for ranks that are out of step (desync.py): what differs, on which ranks, and what the
user should change.
"""

from __future__ import annotations

from collections.abc import Sequence


def counter_message(
    call: int, differing: Sequence[int], of: int, what: str, pair: tuple[int, int], base: int
) -> str:
    """The error for ranks ``differing``, out of ``of``, whose counter ``what`` has the first value
    of ``pair`` before ``call``, where rank ``base`` has the second.
    """
    there, here = map(_mode_name, pair) if what == "mode" else pair
    said = _DIFFERENCES[what].format(there=there, here=here, base=base)
    return (
        f"the ranks have drifted apart before call {call}: {_ranks(differing, of)} {said}. Start "
        "again from the last checkpoint"
    )


def batch_message(
    call: int,
    calls: int,
    differing: Sequence[int],
    of: int,
    name: str,
    base: int = 0,
    why: str | None = None,
) -> str:
    """The error for ranks that were given another input ``name`` than rank ``base`` in one of the
    ``calls`` calls that end with ``call``. ``why`` they must be the same: by default, because every
    rank passes the global batch.
    """
    who = _ranks(differing, of)
    given = f"was given another {name} than rank {base}"
    return f"in {which_call(call, calls)} {who} {given}: {why or _SAME_BATCHES}"


def which_call(call: int, calls: int) -> str:
    """One of the ``calls`` calls that end with ``call``."""
    return f"call {call}" if calls == 1 else f"one of the calls {call - calls + 1} to {call}"


def _ranks(ranks: Sequence[int], of: int) -> str:
    return f"rank {', '.join(map(str, ranks))} of {of}"


def _mode_name(mode: int) -> str:
    """The name of a program's mode: its lowest bit is whether gradients are on, the next whether
    they wait for their sum.
    """
    name = ("train()" if mode < 4 else "eval()") + ("" if mode % 2 else " without gradients")
    return f"{name} in no_sync()" if mode & 2 else name


_SAME_BATCHES = (
    "every rank takes its part of the whole global batch, so each must be given all of it, in the "
    "same order; or a rank has skipped a "
    "batch. Instead of DataLoader(dataset, batch_size=local, sampler=DistributedSampler(dataset)) "
    "write DataLoader(dataset, "
    "batch_size=global, shuffle=True, generator=torch.Generator().manual_seed(0), "
    "drop_last=True), without a sampler that knows the rank, or let each replica load its own "
    'samples: compile with batch="local" and take compiled.sampler(dataset); '
    "after an exception that one rank catches, all must go on with the same batch"
)
_DIFFERENCES = {
    "program": "called another compiled program than rank {base}: all ranks must call the same "
    "programs in the same order",
    "calls": "had called the program {there} times, rank {base} {here} times: all ranks must call "
    "it equally often",
    "mode": "called the program in another mode than rank {base}, in {there}, not in {here}: "
    "train(), eval(), torch.no_grad() and no_sync() must be "
    "alike on all ranks, of the program and of its parts, and none may differ from the others in "
    "what its code does in eval()",
    "trains": "had frozen other parameters than rank {base}: requires_grad must be alike on all "
    "ranks",
    "failures": "had {there} calls or backwards that failed, rank {base} {here}: what fails on "
    "one rank has failed on all, so a loop that "
    "catches the exception must go on alike on all ranks",
    "backwards": "had run the backward of {there} losses, rank {base} of {here}: all ranks must "
    "call backward after the same calls",
    "steps": "had let its optimizer step after {there} calls, rank {base} after {here}: a step "
    "must be made or skipped by all ranks alike",
    "restarts": "seeded torch's default generator, or set the random state, and rank {base} did "
    "not, or the other way round: do it on "
    "all, or keep it apart with torch.random.fork_rng()",
    "stream": "draws random numbers of another seed than rank {base}: set random_state alike on "
    "all ranks",
    "drawn": "had drawn in {there} calls, rank {base} in {here}: set the generator, random_state "
    "and the mode alike on all ranks",
}
