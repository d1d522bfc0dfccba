# SPDX-License-Identifier: Apache-2.0
"""Reload of the configuration while the daemon runs: some keys take effect, others need a restart."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.config import Config, Reading
from infranetes.config.in_force import ConfigInForce
from infranetes.config.schema import LEVELS
from infranetes.daemon.assembly import Daemon
from infranetes.daemon.service_manager import ServiceManager
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import ConfigError, InfranetesError
from infranetes_common.hangups import differences, refuse, report
from infranetes_common.logging import LogOutput
from infranetes_common.reactors import IReactor

UNEXPECTED = "a fault of Infranetes itself, which the journal has"

_log = Logger()


def in_force(running: Config, read: Config) -> Config:
    """Return the configuration in force after a daemon that runs with `running` has reloaded `read`."""
    images = attrs.evolve(
        read.images,
        preload=running.images.preload,  # the VMs' template has them
        max_parallel_pulls=running.images.max_parallel_pulls,
    )
    return attrs.evolve(running, log=read.log, control=read.control, pool=read.pool, images=images)


class Reload:
    """Reloads the configuration. A file with any error changes nothing.

    :param manager: the service manager, which is told of each reload and its end.
    :param output: where the daemon logs to. :param config_in_force: what it was started with.
    :param read: reads the configuration again, flags included.
    """

    def __init__(
        self,
        reactor: IReactor,
        daemon: Daemon,
        manager: ServiceManager,
        output: LogOutput,
        config_in_force: ConfigInForce,
        read: Callable[[], Reading],
    ) -> None:
        self._reactor = reactor
        self._daemon = daemon
        self._manager = manager
        self._output = output
        self._config_in_force = config_in_force
        self._read = read
        self._origin = config_in_force.now.started.sources.main

    async def __call__(self) -> None:
        """Reload. An error in the file is logged, and changes nothing."""
        self._manager.reloading()
        try:
            refusal = await self._reload()
        except CancelledError:  # the daemon stops
            raise
        except Exception:
            self._manager.reloaded(UNEXPECTED)
            raise
        self._manager.reloaded(refusal)

    async def _reload(self) -> str:
        """Return why nothing was reloaded; "": the file is in force."""
        try:
            read = await run_in_thread(self._reactor, self._checked)
        except InfranetesError as error:
            refuse(_log, error)
            self._config_in_force.refuse(str(error))
            return str(error)
        before = self._config_in_force.now.running
        running = in_force(before, read.config)
        taken, waiting = differences(before, running), differences(running, read.config)
        self._daemon.reconfigure(running)
        self._config_in_force.take(read, running, self._reactor.seconds())
        # The report is written at the more verbose of the two levels.
        quieter = LEVELS.index(running.log.level) > LEVELS.index(before.log.level)
        if not quieter:
            self._output.change(running.log.format, running.log.level)
        report(_log, self._origin, taken, waiting)
        if quieter:
            self._output.change(running.log.format, running.log.level)
        return ""

    def _checked(self) -> Reading:
        read = self._read()
        try:
            self._daemon.check(read.config)
        except ConfigError as error:
            raise read.sources.placed(error) from None
        return read
