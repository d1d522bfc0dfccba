# SPDX-License-Identifier: Apache-2.0
"""Run the programs that images are built with, one after the other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
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
    # Not by `commands.thd_run`: its steps are reported as it takes them, and it is ended as it needs to be.
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=directory,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output = [*output[-60:], line.rstrip()]
                if progress is not None and line.startswith(_STEP) and "-hook" not in line:
                    progress(line.removeprefix(_STEP).rstrip())
        except BaseException:
            process.send_signal(end_by)
            raise
    if process.returncode != 0:
        end = redacted_end("\n".join(line for line in output if line), 4000)
        raise InfranetesError(f"{name or command[0]} failed with exit code {process.returncode}:\n{end}")


def check(tools: Mapping[str, str], purpose: str) -> None:
    """Check that programs are there.

    :param tools: Debian's package of each. :param purpose: what they are for: "to build a guest image".
    :raise FailedPrecondition: some are missing; the message says how to install them.
    """
    missing = {package for tool, package in tools.items() if not shutil.which(tool, path=PATH)}
    if missing:
        raise FailedPrecondition(f"{purpose}, install: apt-get install {' '.join(sorted(missing))}")
