# SPDX-License-Identifier: Apache-2.0
"""The configuration, read again while the daemon runs: what takes effect, and what needs a restart."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.logger import Logger

from infranetes.config import LEVELS, Config, Reading
from infranetes.daemon.assembly import Daemon
from infranetes.daemon.service_manager import ServiceManager
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import ConfigError, InfranetesError
from infranetes_common.hangups import differences, refuse, report
from infranetes_common.logging import Output
from infranetes_common.reactors import IReactor

_log = Logger()


def in_force(running: Config, read: Config) -> Config:
    """Return what is in force once a daemon that runs with `running` has taken what it can of `read`."""
    images = attrs.evolve(
        read.images,
        preload=running.images.preload,  # the template of the VMs has them
        max_parallel_pulls=running.images.max_parallel_pulls,
    )
    return attrs.evolve(running, log=read.log, pool=read.pool, images=images)


class Reload:
    """Reloads the configuration. A file with any error changes nothing.

    :param manager: the service manager, which is notified once the daemon serves.
    :param output: where the daemon logs to. :param started: what it was started with.
    :param read: reads the configuration again, flags included.
    """

    def __init__(
        self,
        reactor: IReactor,
        daemon: Daemon,
        manager: ServiceManager,
        output: Output,
        started: Reading,
        read: Callable[[], Reading],
    ) -> None:
        self._reactor = reactor
        self._daemon = daemon
        self._manager = manager
        self._output = output
        self._running = started.config
        self._read = read
        self._origin = started.sources.main

    async def __call__(self) -> None:
        """Reload. An error in the file is logged, and changes nothing."""
        if not self._daemon.serves:  # the service manager knows the daemon as starting
            await self._reload()
            return
        self._manager.reloading()
        error = await self._reload()
        self._manager.ready(f"serving; the configuration was not reloaded: {error}" if error else "serving")

    async def _reload(self) -> str:
        try:
            read = await run_in_thread(self._reactor, self._checked)
        except InfranetesError as error:
            refuse(_log, error)
            return str(error)
        before, self._running = self._running, in_force(self._running, read)
        taken, waiting = differences(before, self._running), differences(self._running, read)
        self._daemon.reconfigure(self._running)
        # The report is written at the more verbose of the two levels.
        quieter = LEVELS.index(read.log.level) > LEVELS.index(before.log.level)
        if not quieter:
            self._change_log()
        report(_log, self._origin, taken, waiting)
        if quieter:
            self._change_log()
        return ""

    def _checked(self) -> Config:
        read = self._read()
        try:
            self._daemon.check(read.config)
        except ConfigError as error:
            raise read.sources.placed(error) from None
        return read.config

    def _change_log(self) -> None:
        self._output.change(self._running.log.format, self._running.log.level)
