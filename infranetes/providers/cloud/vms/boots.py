# SPDX-License-Identifier: Apache-2.0
"""Waiting until VMs run and have their addresses, and saying why one has ended instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic

from twisted.internet.defer import Deferred

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.interface import Action, Cloud, CloudError, CloudVM, D
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.interface import InstanceState
from infranetes_common.errors import NotFound, Unavailable
from infranetes_common.redaction import redacted_end

CONSOLE_CHARACTERS = 1000


class Boots(Generic[D]):
    """The boots of one provider's VMs.

    :param waiting: makes lists show a VM's changes, as `Watcher.waiting`. :param get: looks at a VM.
    """

    def __init__(
        self,
        cloud: Cloud[D],
        settings: CloudSettings,
        calls: Calls[D],
        ledger: Ledger,
        waiting: Callable[[str], AbstractContextManager[Callable[[], Deferred[None]]]],
        get: Callable[[str], Awaitable[CloudVM]],
    ) -> None:
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._ledger = ledger
        self._waiting = waiting
        self._get = get

    async def wait_running(self, id: str) -> CloudVM:
        """Return a VM once it runs and has its addresses. If it is to have an elastic address, it is given
        that first.

        :raise Unavailable: it has ended; says why.
        :raise NotFound: it was destroyed meanwhile, or there is none."""
        entry = self._ledger.entries.get(id)
        vm = entry.vm if entry is not None else await self._get(id)
        with self._waiting(id) as changed:
            while True:
                if vm.state is InstanceState.RUNNING and vm.private_address:
                    if not vm.wanted_address or vm.public_address:
                        return vm
                    await self._calls.call(
                        f"give VM {id} its address",
                        partial(self._cloud._thd_assign_address, vm=vm),
                        action=Action.CHANGE,
                    )
                    vm = await self._get(id)
                    if vm.public_address:
                        continue
                if vm.state is InstanceState.ENDED:
                    raise Unavailable(await self._why_ended(vm))
                await changed()
                if id not in self._ledger.entries:
                    raise NotFound(f"VM {id} was destroyed meanwhile")
                vm = self._ledger.entries[id].vm

    async def _why_ended(self, vm: CloudVM) -> str:
        try:
            console = await self._calls.call(
                f"read the console of VM {vm.id}",
                partial(self._cloud._thd_console_output, id=vm.id),
                seconds=self._settings.call_seconds,
            )
        except CloudError:
            console = ""
        tail = f"; its console ends with: {redacted_end(console, CONSOLE_CHARACTERS)}" if console else ""
        return f"VM {vm.id} has ended: {vm.detail or 'the cloud gives no reason'}{tail}"
