"""`twistd` with a daemon that ends itself by SIGKILL around its nth write to the store.

    python -m tests.infranetes.daemon.crashing before|after N FILE TWISTD-ARGUMENTS...

`before`: the write is lost. `after`: it is on the disk and nobody was told. FILE gets a line per write
that was done, which is how a test learns how many there are.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from twisted.scripts.twistd import run

from infranetes.pods import database


def install(when: str, number: int, journal: str) -> None:
    """Make the process end around that write; 0: never."""
    done = [0]
    real = database.apply

    def apply(connection: Any, writes: Any) -> list[Any]:
        results: list[Any] = []
        for write in writes:  # one by one, so that each is a place to end at
            done[0] += 1
            if done[0] == number and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            results.extend(real(connection, [write]))
            with open(journal, "a") as file:
                file.write(f"{done[0]}\n")
            if done[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return results

    database.apply = apply


if __name__ == "__main__":
    install(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.argv = ["twistd", *sys.argv[4:]]
    run()
