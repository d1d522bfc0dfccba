# SPDX-License-Identifier: Apache-2.0
"""What is kept of a test that fails: its logs; with KEEP=1 all that it made, until somebody has looked."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import TimeoutError, maybeDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SkipTest, TestCase

from infranetes_common.reactors import installed
from tests.support.keeping import keeping

LOOK_SECONDS = 7 * 86_400.0  # for which a kept test may be looked at
AFTER_SECONDS = 60.0  # for keeping the logs once a test has failed
LOOK_PAUSE = 0.5

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


class KeptCase(_Base):
    """A mixin for a case with programs of its own: if a test fails, copies of their logs are kept.

    With the environment variable KEEP, a test stops where it fails, before it cleans up: daemons, VMs and
    simulated clouds stay as they are until the file that it names is deleted.
    """

    # Hooks.

    def kept_logs(self) -> Iterable[Path]:
        """Return the files that say what happened."""
        raise NotImplementedError

    def ways_in(self) -> Iterable[str]:
        """Return commands that show what runs."""
        return ()

    # The mixin.

    def run(self, result: Any) -> Any:  # Any: as in trial
        """Run the test."""
        for name in ("setUp", self._testMethodName):
            setattr(self, name, self._watched(getattr(self, name)))
        return super().run(result)

    def getTimeout(self) -> float:
        """Return how long trial lets any part of the test take; the test's own timeout ends it earlier."""
        return float(super().getTimeout()) + (LOOK_SECONDS if keeping() else AFTER_SECONDS)

    def _watched(self, function: Callable[[], Any]) -> Callable[[], Coroutine[Any, Any, Any]]:
        def timed_out(_: object, seconds: float) -> Failure:
            return Failure(
                TimeoutError(f"{self.id()} ({function.__name__}) still running at {seconds:g} secs")
            )

        @functools.wraps(function)
        async def watched() -> Any:
            seconds = super(KeptCase, self).getTimeout()
            try:
                return await maybeDeferred(function).addTimeout(seconds, installed(), timed_out)
            except SkipTest:
                raise
            except BaseException:
                await self._show(Failure())
                raise

        return watched

    async def _show(self, failure: Failure) -> None:
        directory = Path(self.mktemp()).absolute()
        kept = [log for log in self.kept_logs() if log.is_file()]
        for number, log in enumerate(kept):
            directory.mkdir(exist_ok=True)
            shutil.copyfile(log, directory / f"{number}-{log.name}")
        if kept:
            say(f"\nThe logs of {self.id()} are in {directory}: {', '.join(map(str, kept))}")
        if keeping():
            await self._wait_for_a_look(failure, directory)

    async def _wait_for_a_look(self, failure: Failure, directory: Path) -> None:
        faulthandler.cancel_dump_traceback_later()  # nothing is stuck
        sign = directory.with_name("kept")
        sign.touch()
        with _findable() as shell:
            say(failure.getTraceback(), f"{self.id()} has failed. All that it made is kept until you run:")
            say(f"    rm {sign}", "To look at it, in a shell that sees what the test sees:", f"    {shell}")
            say(*(f"    {way}" for way in self.ways_in()))
            while sign.exists():
                await deferLater(installed(), LOOK_PAUSE, lambda: None)


@contextlib.contextmanager
def _findable() -> Iterator[str]:
    """Return a context manager for the command of a shell in this process's namespaces.

    They are found by a process in them, as processes may have other ids outside.
    """
    name = f"kept-{secrets.token_hex(4)}"
    with subprocess.Popen([name, "infinity"], executable=shutil.which("sleep")) as found:
        try:
            yield f"nsenter --target $(pgrep --full '[{name[0]}]{name[1:]}') --net --mount --pid"
        finally:
            found.kill()


def say(*lines: str) -> None:
    """Print lines at once, and if a file or pipe takes them, on the terminal too."""
    print(*lines, sep="\n", flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(*lines, sep="\n", file=terminal)
