# SPDX-License-Identifier: Apache-2.0
"""Run the programs that images are built with, one after the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infranetes_common.commands import PATH
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.redaction import redacted_end

Progress = Callable[[str], None]

_STEP = "I: "  # the prefix of mmdebstrap's steps


def run(
    *command: str,
    progress: Progress | None = None,
    end_by: signal.Signals = signal.SIGTERM,
    name: str = "",
    directory: Path | None = None,
) -> None:
    """Run a program to its end; the lines that begin with `I: ` are passed to `progress`.

    :param end_by: what it is sent if it can't be waited for, as at an interruption.
    :param name: what it is called in an error; "": its own name.
    :param directory: where it runs.
    :raise InfranetesError: it failed; the message has the end of its output.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    output: list[str] = []
    process: subprocess.Popen[str] | None = None
    # Not by `commands.thd_run`: its steps are reported as it takes them, and it is ended as it needs to be.
    try:
        with _later_interrupts():  # one that came while it is started would leave it running, unknown
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                cwd=directory,
            )
        assert process.stdout is not None
        for line in process.stdout:
            output = [*output[-60:], line.rstrip()]
            if progress is not None and line.startswith(_STEP) and "-hook" not in line:
                progress(line.removeprefix(_STEP).rstrip())
    except BaseException:
        if process is not None:
            process.send_signal(end_by)
        raise
    finally:
        if process is not None:
            with process:  # which closes its output, and waits for its end
                pass
    if process.returncode != 0:
        end = redacted_end("\n".join(line for line in output if line), 4000)
        raise InfranetesError(f"{name or command[0]} failed with exit code {process.returncode}:\n{end}")


@contextlib.contextmanager
def _later_interrupts() -> Iterator[None]:
    """Have SIGINT and SIGTERM come after the block. Does nothing outside of the main thread."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):  # what is ignored stays so, for the program too
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def check(tools: Mapping[str, str], purpose: str) -> None:
    """Check that programs are there.

    :param tools: Debian's package of each. :param purpose: what they are for: "to build a guest image".
    :raise FailedPrecondition: some are missing; the message says how to install them.
    """
    missing = {package for tool, package in tools.items() if not shutil.which(tool, path=PATH)}
    if missing:
        raise FailedPrecondition(f"{purpose}, install: apt-get install {' '.join(sorted(missing))}")
