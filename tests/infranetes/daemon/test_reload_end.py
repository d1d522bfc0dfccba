# SPDX-License-Identifier: Apache-2.0
"""What the service manager is told of the end of a reload."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import read
from infranetes.config.in_force import ConfigInForce
from infranetes.daemon import reload
from infranetes.daemon.assembly import Daemon
from infranetes.daemon.reload import Reload
from infranetes.daemon.service_manager import ServiceManager
from infranetes_common.concurrency import start
from infranetes_common.errors import ConfigError
from infranetes_common.logging import LogOutput
from infranetes_common.reactors import installed


class EndTests(SynchronousTestCase):
    def setUp(self) -> None:
        file = Path(self.mktemp())
        file.write_text("")
        self.told: list[str] = []
        manager = ServiceManager(self.told.append)
        manager.ready("ready")
        self.reading: Deferred[object] = Deferred()
        self.patch(reload, "run_in_thread", lambda *_: self.reading)
        known = ConfigInForce(read(str(file), {}))
        daemon = cast(Daemon, None)  # nothing is asked of it before the file has been read
        self.reload = Reload(installed(), daemon, manager, LogOutput(), known, lambda: read(str(file), {}))

    def test_a_refusal(self) -> None:
        work = start(self.reload())
        self.reading.errback(ConfigError("log.level: expected a level"))
        self.successResultOf(work)
        self.assertIn("READY=1", self.told[-1])
        self.assertIn("was not reloaded: log.level: expected a level", self.told[-1])

    def test_a_fault_is_told_and_raised(self) -> None:
        work = start(self.reload())
        self.reading.errback(ZeroDivisionError())
        self.failureResultOf(work, ZeroDivisionError)
        self.assertIn(f"was not reloaded: {reload.UNEXPECTED}", self.told[-1])

    def test_nothing_is_told_if_the_daemon_stops_meanwhile(self) -> None:
        work = start(self.reload())
        told = list(self.told)
        work.cancel()
        self.failureResultOf(work, CancelledError)
        self.assertEqual(self.told, told)
