# SPDX-License-Identifier: Apache-2.0
"""The hypervisors of all VMs that boot images, and the sizes of these VMs' consoles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from infranetes.providers.qemu.vm import console_file
from infranetes.providers.qemu.vm.hypervisor import Hypervisor, NetworkOf
from infranetes.providers.qemu.vm.record import VmRecord, VmRecords
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import deferred, run_in_thread, settled
from infranetes_common.concurrency.threads import LOGS
from infranetes_common.reactors import IReactor

_SECONDS = 5.0  # between looks at the consoles' sizes
_log = Logger()


class Hypervisors:
    """Makes them when they are asked for.

    :param why_ended: tells why the node has ended a VM's process; "": it has not.
    :param network_of: returns the network of a VM's card.
    :param has_address: returns whether a VM's guest was given its address.
    :param console_size: bytes of a VM's console that are kept; at least the last half of this.
    """

    def __init__(
        self,
        reactor: IReactor,
        records: VmRecords,
        why_ended: Callable[[VmRecord], str],
        network_of: NetworkOf,
        has_address: Callable[[Vm], bool],
        console_size: int,
    ) -> None:
        self._reactor = reactor
        self._records = records
        self._why_ended = why_ended
        self._network_of = network_of
        self._has_address = has_address
        self._console_size = console_size
        self._by_token: dict[str, Hypervisor] = {}
        self._vms: dict[str, Vm] = {}
        self._rounds = LoopingCall(deferred(self._round))
        self._rounds.clock = reactor

    def of(self, vm: Vm) -> Hypervisor:
        """Return a VM's, always the same."""
        token = vm.record.token
        if token not in self._by_token or self._vms[token] is not vm:
            self._vms[token] = vm
            self._by_token[token] = Hypervisor(
                self._reactor, vm, self._save, self._why_ended, self._network_of, self._has_address
            )
        return self._by_token[token]

    def begin(self, vms: Iterable[Vm]) -> None:
        """Follow the guests that earlier daemons had, and see to the consoles' sizes until `close`."""
        for vm in vms:
            if vm.record.guest is not None:
                self.of(vm).follow()
        self._rounds.start(_SECONDS, now=False).addErrback(
            lambda failure: _log.failure("the consoles are not trimmed", failure)
        )

    def forget(self, vm: Vm) -> None:
        """Handle the end of a VM that is destroyed."""
        if self._vms.get(vm.record.token) is vm:
            del self._vms[vm.record.token]
            self._by_token.pop(vm.record.token).destroyed()

    async def close(self) -> None:
        """Release what is held; VMs go on. Idempotent."""
        if self._rounds.running:
            self._rounds.stop()
        await settled(hypervisor.close() for hypervisor in self._by_token.values())
        self._by_token.clear()
        self._vms.clear()

    async def _save(self, record: VmRecord) -> None:
        await run_in_thread(self._reactor, self._records.update, record)

    async def _round(self) -> None:
        consoles = [vm.paths.console for vm in self._vms.values() if vm.alive]
        if consoles:
            await run_in_thread(self._reactor, _thd_trim, consoles, self._console_size, purpose=LOGS)


def _thd_trim(consoles: Sequence[Path], size: int) -> None:
    for path in consoles:
        try:
            console_file.forget(path, size)
        except FileNotFoundError:
            continue  # it was destroyed meanwhile
        except OSError as error:
            _log.warn("the console {path} grows: {error}", path=str(path), error=str(error))
