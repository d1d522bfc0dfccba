# SPDX-License-Identifier: Apache-2.0
"""Upkeep of the service proxy over the VM's life: room for its connections, and tables that stay whole."""

from __future__ import annotations

import os
from typing import Protocol

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from infranetes_common.concurrency import deferred, run_in_thread, settled, start
from infranetes_common.errors import InfranetesError
from infranetes_common.nftables_watch import TablesWatch
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy

MEND_SECONDS = 600.0  # between two checks of the tables, each of which wakes an idle VM

_log = Logger()


class Mended(Protocol):
    """An owner of state in the kernel."""

    @property
    def watch(self) -> TablesWatch:
        """The watch that restores the state when another program changes it."""

    async def prepare(self) -> None:
        """Do what can be done before the VM is a pod's."""

    async def mend(self) -> object:
        """Restore the state if another program has changed it."""


class Upkeep:
    """The upkeep, which begins once the VM has its identity and goes on until the agent ends.

    :param others: owners of other state to look after, in addition to the proxy.
    """

    def __init__(self, reactor: IReactor, kernel: Kernel, proxy: ServiceProxy, *others: Mended) -> None:
        self._reactor = reactor
        self._kernel = kernel
        self._mended: tuple[Mended, ...] = (proxy, *others)
        self._looking = LoopingCall(self._look)
        self._looking.clock = reactor

    async def prepare(self) -> None:
        """Make the tables early, as a template does for all its clones. Failures are only logged."""
        for each in self._mended:
            try:
                await each.prepare()
            except InfranetesError as error:
                _log.warn("tables are made later: {error}", error=error)

    def begin(self) -> None:
        """Begin. Idempotent."""
        for each in self._mended:
            each.watch.begin()
        if not self._looking.running:
            self._looking.start(MEND_SECONDS, now=False).addErrback(
                lambda failure: _log.failure(
                    "checking the service proxy's tables ended unexpectedly", failure=failure
                )
            )
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            raised = start(run_in_thread(self._reactor, self._kernel.thd_raise_limits, memory))
            raised.addErrback(lambda failure: _log.failure("the number of connections", failure=failure))

    @deferred
    async def end(self) -> None:
        """End, and fire when no repair is under way. Idempotent."""
        if self._looking.running:
            self._looking.stop()
        await settled([each.watch.end() for each in self._mended])

    @deferred
    async def _look(self) -> None:
        for each in self._mended:
            try:
                await each.mend()
            except InfranetesError as error:
                _log.warn("the service proxy's tables can't be restored: {error}", error=error)
