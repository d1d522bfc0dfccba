# SPDX-License-Identifier: Apache-2.0
"""The node daemon as a child process, for as long as the demo lasts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater

from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from txgrpc import Channel, Code, GrpcError
from txgrpc.channel import Backoff

_POLL_SECONDS = 0.1
_OFTEN = Backoff(first=0.05, most=0.2)  # until its socket is there
_END_SECONDS = 30.0
_TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()")
TREE = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def no_answer() -> Iterator[None]:
    """Go on after a call that fails, unless it fails because this process was interrupted."""
    try:
        yield
    except GrpcError as error:
        if error.code is Code.CANCELLED:
            raise


class DaemonFailed(Exception):
    """The daemon ended, or is not ready in time; the message has the end of its log."""


@attrs.define
class Daemon:
    """`twistd infranetes` with one configuration file, its output in the file `log`."""

    reactor: IReactor
    config: Path
    socket: Path
    log: Path
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. It ends with the demo, but not by the terminal's Ctrl-C, for cleaning up needs it."""
        command = [
            *("setpriv", "--pdeathsig", "TERM", "--", *_TWISTD),
            *("--nodaemon", "--pidfile=", "infranetes", "--config", str(self.config)),
        ]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=TREE
            )

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process is not None and self._process.poll() is None

    def channel(self) -> Channel:
        """A channel to the CRI socket."""
        endpoint = UNIXClientEndpoint(self.reactor, str(self.socket))
        return Channel(self.reactor, endpoint, backoff=_OFTEN)

    def output(self, lines: int = 15) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    async def ready(self, runtime: RuntimeStub, within: float, progress: Callable[[str], None]) -> None:
        """Wait until its runtime and network conditions hold.

        :param within: seconds.
        :param progress: called with the messages of conditions that do not hold yet.
        :raise DaemonFailed: it ended or is not ready in time.
        """
        until = time.monotonic() + within
        shown = ""
        while True:
            waiting = "it does not answer yet"
            with no_answer():
                status = await runtime.Status(cri.StatusRequest(verbose=True), timeout=5.0)
                missing = [each for each in status.status.conditions if not each.status]
                if status.status.conditions and not missing:
                    return
                waiting = "; ".join(dict.fromkeys(each.message or each.type for each in missing))
                if waiting and waiting != shown:
                    shown = waiting
                    progress(waiting)
            if self._process is None or self._process.poll() is not None:
                raise DaemonFailed(f"the daemon ended; its log is {self.log}:\n{self.output()}")
            if time.monotonic() > until:
                raise DaemonFailed(
                    f"not ready after {within:.0f} s ({waiting}); see {self.log}:\n{self.output()}"
                )
            await deferLater(self.reactor, _POLL_SECONDS)

    async def end(self) -> None:
        """End it, by force if it takes too long. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            until = time.monotonic() + _END_SECONDS
            while process.poll() is None and time.monotonic() < until:
                await deferLater(self.reactor, 0.05)
            if process.poll() is not None:
                return
