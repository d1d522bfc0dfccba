# SPDX-License-Identifier: Apache-2.0
"""Runs `make demo` in a terminal of its own and keeps what it shows."""

from __future__ import annotations

import codecs
import contextlib
import os
import platform
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from demo.recording.cast import Cast, Output
from demo.recording.screen import shown

COLUMNS, ROWS = 100, 40
COMMAND = ("make", "demo")
_RELEASE = re.compile(r"The node daemon is ready: infranetes (\S+)")
_ACCELERATOR = re.compile(r"QEMU uses (\w+)")


class NotRecorded(Exception):
    """The run is not one to show, and the message says why."""


def record(tree: Path, command: Sequence[str] = COMMAND, log: Path | None = None) -> Cast:
    """Run the command and return the recording. Blocks until the command has ended.

    :param log: the daemon's, which says what starts the VMs; by default the demo's.
    :raise NotRecorded: it failed, or did what only a first run does.
    """
    outputs = _run(tree, command)
    typed = " ".join(COMMAND if command[0] == COMMAND[0] else command)
    bare = Cast(COLUMNS, ROWS, typed, "", "", outputs)
    end = "\n".join(each.text for each in shown(bare) if each.end is None)
    if not (found := _RELEASE.search(end)):
        raise NotRecorded(f"`{bare.command}` did not say which Infranetes is ready: {end[-400:]!r}")
    if any("booting the template" in each.text for each in outputs):
        raise NotRecorded("this run made the template of its VMs, which comes once: record again")
    logged = (log or tree / "build/demo/daemon.log").read_text(errors="replace")
    return Cast(COLUMNS, ROWS, bare.command, taken_on(logged), found[1], outputs)


def taken_on(logged: str) -> str:
    """Return what the run was taken on, in words. :param logged: what the daemon logged."""
    found = _ACCELERATOR.search(logged)
    how = {"kvm": "KVM", "tcg": "emulated (no KVM)"}.get(found[1] if found else "", "simulated VMs")
    return f"{how}, {os.cpu_count()} processors at load {os.getloadavg()[0]:.0f}, {platform.machine()}"


def _run(tree: Path, command: Sequence[str]) -> tuple[Output, ...]:
    master, slave = pty.openpty()
    try:
        termios.tcsetwinsize(slave, (ROWS, COLUMNS))
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        process = subprocess.Popen(  # noqa: S603  the caller's own command
            command,
            cwd=tree,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        try:
            outputs = _read(master)
        except BaseException:  # Ctrl-C, which a session of its own does not get
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(OSError):  # it says what it undoes
                while os.read(master, 1 << 16):
                    pass
            process.wait()
            raise
    finally:
        os.close(master)
    if code := process.wait():
        end = "".join(each.text for each in outputs)[-1000:]
        raise NotRecorded(f"`{' '.join(command)}` ended with {code}: {end}")
    return tuple(outputs)


def _read(terminal: int) -> list[Output]:
    """Return what is written to a terminal until nobody has it open."""
    outputs: list[Output] = []
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    begun = time.monotonic()
    with contextlib.suppress(OSError):  # EIO, by which Linux says that the last one closed it
        while read := os.read(terminal, 1 << 16):
            outputs.append(Output(round(time.monotonic() - begun, 3), decode(read)))
    return outputs
