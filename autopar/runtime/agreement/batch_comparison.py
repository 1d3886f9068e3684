"""Whether ranks were given the batches that belong together: the same samples within a replica, and
different samples in different replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.runtime.agreement.desync_messages import batch_message, which_call
from autopar.runtime.agreement.input_digests import DIGESTS


class BatchComparison:
    """Compares the digests that ranks have of their inputs.

    Arguments: ``names`` of the inputs; ``data_ranks``, the replica of each rank; ``cut``, for each
    input whether replicas have different samples of it; ``samples``, of a replica's batch;
    ``batch``, "global" or "local".
    """

    def __init__(
        self,
        names: Sequence[str],
        data_ranks: Sequence[int],
        cut: Sequence[bool],
        samples: int,
        batch: str,
    ) -> None:
        self._names, self._data_ranks = list(names), list(data_ranks)
        self._samples, self._is_local = samples, batch == "local"
        places = [min(i, DIGESTS - 1) for i in range(len(cut))]
        # The places of digests of inputs that carry samples.
        self._cut = sorted({place for place, is_cut in zip(places, cut, strict=True) if is_cut})

    def problem(
        self, digests: Sequence[Sequence[int]], call: int, calls: int, is_first: bool
    ) -> str | None:
        """What is wrong with the batches of all ranks, whose ``digests`` are of the ``calls`` calls
        that end with ``call``; None if nothing is. Only where ``is_first`` holds, replicas must
        have different batches.
        """
        return self._contradiction(digests, call, calls) or (
            self._likeness(digests, call, calls) if is_first else None
        )

    def _contradiction(self, digests: Sequence[Sequence[int]], call: int, calls: int) -> str | None:
        """The first input that differs between ranks which must pass the same."""
        for place in range(DIGESTS):
            first: dict[int, int] = {}  # the first rank of each replica, or of all
            for rank, replica in enumerate(self._data_ranks):
                base = first.setdefault(replica if place in self._cut else 0, rank)
                if digests[rank][place] != digests[base][place]:
                    return self._contradiction_message(digests, place, base, call, calls)
        return None

    def _contradiction_message(
        self, digests: Sequence[Sequence[int]], place: int, base: int, call: int, calls: int
    ) -> str:
        replica = self._data_ranks[base]
        among = [
            rank
            for rank, own in enumerate(self._data_ranks)
            if own == replica or place not in self._cut
        ]
        differing = [r for r in among if digests[r][place] != digests[base][place]]
        has_place = place < DIGESTS - 1 or len(self._names) == DIGESTS
        name = self._names[place] if has_place else "one of the last inputs"
        why = None
        if self._is_local and place in self._cut:
            why = f"both are of replica {replica}, whose ranks pass the same samples. "
            why += self._lines()
        elif self._is_local:
            why = "it carries no samples, so all ranks must pass the same"
        return batch_message(call, calls, differing, len(self._data_ranks), name, base, why)

    def _likeness(self, digests: Sequence[Sequence[int]], call: int, calls: int) -> str | None:
        """Whether two replicas were given the same samples."""
        if not self._cut:
            return None
        first: dict[tuple[int, ...], int] = {}
        for rank, replica in enumerate(self._data_ranks):
            other = first.setdefault(tuple(digests[rank][p] for p in self._cut), rank)
            if self._data_ranks[other] != replica:
                return (
                    f"in {which_call(call, calls)} rank {rank} was given the same samples as rank "
                    f"{other}, and they belong to the replicas {replica} and "
                    f"{self._data_ranks[other]}, which must have different samples: a sampler that "
                    f"knows the replica is missing. {self._lines()}\nor pass the whole batch on "
                    'every rank and compile with batch="global"'
                )
        return None

    def _lines(self) -> str:
        """The lines that a loop needs."""
        return (
            "Write\n"
            "    sampler = compiled.sampler(dataset, shuffle=True)\n"
            f"    loader = DataLoader(dataset, batch_size={self._samples}, sampler=sampler, "
            "drop_last=True)\n"
            "    sampler.set_epoch(epoch)  # before each epoch"
        )
