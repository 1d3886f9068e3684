"""``examples/train.py`` with a fault of one rank in each start of the run. ``FAULTS`` in the
environment lists them as JSON: phase, how often it begins before the fault, what happens, rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import train
from injection import HEARD, Action, die, fill_disk, free_disk, inject, stop

import autopar


def tear(tell: Callable[[], None]) -> None:
    """The newest checkpoint loses the end of a file, and the rank dies."""
    time.sleep(HEARD)  # until the save that is under way is complete
    newest = autopar.newest_checkpoint(folder())
    assert newest is not None
    for file in newest.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    die(tell)


ACTIONS: dict[str, Action] = {"dies": die, "stops": stop, "full disk": fill_disk, "torn": tear}


def folder() -> Path:
    return Path(sys.argv[sys.argv.index("--folder") + 1])


def main() -> None:
    faults = json.loads(os.environ["FAULTS"])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(faults) and os.environ["RANK"] == faults[start][3]:
        phase, number, what, rank = faults[start]

        def tell() -> None:
            name = f"{phase}: {what} (rank {rank})"
            line = json.dumps({"fault": name, "start": start, "time": time.time()})
            with Path(os.environ["FAULTS_TOLD"]).open("a") as file:
                file.write(line + "\n")

        inject(phase, number, lambda: ACTIONS[what](tell))
        if what == "full disk":
            inject(phase, number + 1, free_disk)
    train.main()


if __name__ == "__main__":
    main()
