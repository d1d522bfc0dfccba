# SPDX-License-Identifier: Apache-2.0
"""`twistd` with a daemon that kills itself with SIGKILL around its Nth write to the store.

    python -m tests.infranetes.daemon.crashing before|after N[,LABEL] FILE TWISTD-ARGUMENTS...

With a LABEL it dies at the first write that has this label, or at the Nth if that comes first. With `before`,
the write is lost; with `after`, it is on the disk, but nobody has been told. FILE gets a line for each write
that was done, or at which the daemon died: its number, and its label (such as `sandboxes ready`).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from twisted.scripts.twistd import run

from infranetes.pods.store import database


def install(when: str, number: int, journal: str, wanted: str = "") -> None:
    """Make the process die around that write, or the first with the label `wanted`. 0: never."""
    done = [0]
    real = database.apply
    label_writes()

    def note(write: Any, words: str = "") -> None:
        with open(journal, "a") as file:
            file.write(f"{done[0]} {getattr(write, 'label', '?')}{words}\n")

    def apply(connection: Any, writes: Any) -> list[Any]:
        results: list[Any] = []
        for write in writes:  # one by one, so that the daemon can die at each
            done[0] += 1
            last = number and (done[0] == number or getattr(write, "label", "?") == wanted)
            if last and when == "before":
                note(write, ": killed before")
                os.kill(os.getpid(), signal.SIGKILL)
            results.extend(real(connection, [write]))
            note(write, ": killed after" if last else "")
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
        return results

    database.apply = apply


def label_writes() -> None:
    """Give each write a label: the table and, for a record, its state."""

    def labelled(name: str, label: Any) -> None:
        real = getattr(database, name)

        def make(*arguments: Any) -> Any:
            write = real(*arguments)

            def same(connection: Any) -> Any:
                return write(connection)

            same.label = label(*arguments)  # type: ignore[attr-defined]
            return same

        setattr(database, name, make)

    labelled("put", lambda table, record: f"{table} {record.state.value}")
    labelled("delete", lambda table, id: f"{table} deleted")
    labelled("put_log", lambda *_: "logs")
    labelled("put_setting", lambda name, _: f"setting {name}")
    labelled("update_pool", lambda record: f"pool {record.state.value} again")
    labelled("claim", lambda record: "pool claimed")


def main() -> None:
    """Run the program."""
    number, _, wanted = sys.argv[2].partition(",")
    install(sys.argv[1], int(number), sys.argv[3], wanted)
    sys.argv = ["twistd", *sys.argv[4:]]
    run()


if __name__ == "__main__":
    main()
