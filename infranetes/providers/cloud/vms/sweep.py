# SPDX-License-Identifier: Apache-2.0
"""Release addresses and disks of ours that no VM uses any more: they cost money too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.passes import one_pass
from infranetes.providers.cloud.interface import Action, Cloud, D, Leftover
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes_common.concurrency import sleep

_log = Logger()


class Sweeper(Generic[D]):
    """Releases what was unused in two consecutive passes.

    :param busy_tokens: returns the tokens of VMs that are being worked on: leftovers with these tokens are
        left alone.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        cloud: Cloud[D],
        settings: CloudSettings,
        calls: Calls[D],
        ledger: Ledger,
        busy_tokens: Callable[[], list[str]],
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._ledger = ledger
        self._busy_tokens = busy_tokens
        self._unused: set[Leftover] = set()  # found unused in the last pass
        self._stopped = False

    async def run(self) -> None:
        """Sweep until stopped."""
        while not self._stopped:
            await sleep(self._reactor, self._settings.sweep_seconds)
            with one_pass(self._cloud.location, "sweeping"):
                await self.sweep()

    def stop(self) -> None:
        """Sweep no more."""
        self._stopped = True

    async def sweep(self) -> None:
        """Make one pass."""
        leftovers = await self._calls.call("look for addresses and disks", self._cloud._thd_leftovers)
        used = {entry.vm.token for entry in self._ledger.live()} | set(self._busy_tokens())
        unused = {leftover for leftover in leftovers if leftover.token not in used}
        twice, self._unused = unused & self._unused, unused
        for leftover in twice:
            await self._release(leftover)

    async def _release(self, leftover: Leftover) -> None:
        _log.warn(
            "{cloud}: {kind} {id} belongs to this node and no VM uses it: releasing it",
            cloud=self._cloud.location,
            kind=leftover.kind,
            id=leftover.id,
        )
        await self._calls.call(
            f"release {leftover.kind} {leftover.id}",
            partial(self._cloud._thd_release, leftover=leftover),
            action=Action.CHANGE,
        )
