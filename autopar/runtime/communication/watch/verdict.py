"""Which rank the others wait for in vain, and why: found by comparing what ranks write to the store
of the process group.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from autopar.runtime.communication.watch.rank_board import RankBoard

LOST = 3.0  # seconds without a beat, of a rank to which a connection was lost
_SECONDS_TO_AGREE = 8.0  # for the ranks to find such a rank, and for all to read who it is

Progress = dict[str, Any]  # of a rank or of one of its programs, as JSON holds it


class WatchedProgram(Protocol):
    """A program whose progress the watchdog compares between ranks."""

    def progress(self) -> Progress:
        """Its counters, ``now``, and the ``records`` of its last calls, by the call's number."""

    def phase(self) -> str:
        """What it does now, such as "forward of stage 1"; "" for nothing."""

    def divergence(
        self, mine: Progress, its: Progress, ranks: tuple[int, int], of: int
    ) -> str | None:
        """Why ``mine`` and ``its``, the progress of two ``ranks`` out of ``of``, can never become
        equal; None if they still can.
        """


def lost_message(rank: int, board: RankBoard, since: str) -> str:
    """The message for a ``rank`` that does not answer."""
    phase = board.phase_of(rank)
    last = f"last heard of in {phase}" if phase else "never heard of"
    return (
        f"rank {rank} of {board.ranks} {since}: it has ended, or it is stopped, or its machine "
        f"cannot be reached. It was {last}. Start again from the last checkpoint"
    )


class Verdict:
    """The verdict of all ranks: the first that a rank reaches and writes to the ``board``.

    Arguments: ``progress`` of this rank; its ``programs``, by their names.

    Attributes: ``text``; None as long as every rank may still come.
    """

    def __init__(
        self,
        board: RankBoard,
        progress: Callable[[], Progress],
        programs: dict[str, weakref.ref[WatchedProgram]],
    ) -> None:
        self.text: str | None = None
        self._board, self._progress, self._programs = board, progress, programs

    def find(self, silence: float) -> str | None:
        """The verdict: that of another rank, or that a rank can no longer reach the point where
        another one waits, or that it has not beaten for ``silence`` seconds.
        """
        self.text = self.text or self._board.get("verdict")
        if self.text is None:
            mine = self._progress()
            for other in self._board.neighbours:
                its = self._board.get(f"rank{other}")
                found = None if its is None else self._divergence(mine, its, other)
                if found is not None:
                    return self._decide(found)
            return self.find_silent(silence)
        return self.text

    def find_silent(self, silence: float) -> str | None:
        """The verdict that a rank has not beaten for ``silence`` seconds."""
        for other in self._board.neighbours:
            if (seconds := self._board.silence(other)) >= silence:
                since = f"has not answered for {seconds:.0f} s"
                return self._decide(lost_message(other, self._board, since))
        return None

    def wait(self, seconds: float) -> str | None:
        """The verdict after a connection was lost, once all ranks had the time to find it. If all
        answer, the rank is to blame that does not wait for others.

        Raises what the store raises; a timeout error if it does not answer for ``seconds``.
        """
        answer: Future[str | None] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._after_a_loss())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="autopar-verdict", daemon=True).start()
        return answer.result(seconds)

    def _after_a_loss(self) -> str | None:
        end = time.monotonic() + _SECONDS_TO_AGREE
        while time.monotonic() < end:
            if (found := self.find(LOST)) is not None:
                return found
            time.sleep(LOST / 15)
        for other in self._board.neighbours:
            its = self._board.get(f"rank{other}")
            if its is not None and not its["blocked"]:
                return self._decide(
                    f"{self._who(other)} did not come in time: it is in {its['phase']}"
                )
        return None

    def _who(self, rank: int) -> str:
        return f"rank {rank} of {self._board.ranks}"

    def _decide(self, text: str) -> str:
        self.text = self._board.get("verdict") or text
        self._board.put("verdict", self.text)
        return self.text

    def _divergence(self, mine: Progress, its: Progress, other: int) -> str | None:
        """Why rank ``other``, whose progress is ``its``, can no longer reach this rank's."""
        who, own = self._who(other), self._board.rank
        count, failed, call, text = its["failed"] or (0, None, 0, "")
        if failed == "" and count > mine["failures"]:
            return f"{who} failed in {call}: {text}"
        if its["ended"] and not its["programs"]:
            return f"{who} has ended in {its['phase']}"
        for name, here in mine["programs"].items():
            now = here["now"]
            if name == failed and count > now["failures"] and call <= now["calls"]:
                return (
                    f"{who} failed in call {call}: {text}. The others cannot go on without it: "
                    "start again from the last checkpoint"
                )
            there = its["programs"].get(name)
            program = self._programs[name]()
            if there is None or program is None:
                continue
            found = program.divergence(here, there, (own, other), self._board.ranks)
            if found is not None:
                return found
            if its["ended"] and any(now[what] > there["now"][what] for what in now):
                return (
                    f"{who} has ended after call {there['now']['calls']}, and rank {own} is in "
                    f"call {now['calls']}"
                )
        return None
