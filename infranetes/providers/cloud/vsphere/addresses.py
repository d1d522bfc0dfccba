# SPDX-License-Identifier: Apache-2.0
"""Addresses that the node gives its VMs itself, from ranges that are its own.

lease   meaning                              next
free    nobody has the address               asked
asked   recorded; no list has shown its VM   shown; free once vCenter refuses the VM, or after two hours
shown   a list has shown its VM              free once the VM is destroyed, or lists lack it for a minute

A lease is recorded before the VM is asked for, and the VM has its address in its extraConfig: vCenter's next
list tells whatever a daemon has forgotten. A VM that lists show late keeps its address until then.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes_common.concurrency import replace_file
from infranetes_common.identity import Network

ASKED_SECONDS = 2 * 3600.0  # by then, a full clone of a large disk has ended
LACKED_SECONDS = 60.0  # how long lists must lack a VM before it counts as gone: no list is that old

_CONTENT = re.compile(r"([A-Za-z0-9._-]{1,128})( shown)?\n?")
_log = Logger()


@attrs.frozen
class AddressRange:
    """Addresses from the first to the last."""

    first: IPv4Address
    last: IPv4Address

    def __contains__(self, address: IPv4Address) -> bool:
        return self.first <= address <= self.last


def parse_range(text: str) -> AddressRange:
    """Return the range in FIRST-LAST, or in a network. :raise ValueError: it is none."""
    if "/" in text:
        network = IPv4Network(text)
        return AddressRange(network[0], network[-1])
    first, dash, last = text.partition("-")
    found = AddressRange(IPv4Address(first.strip()), IPv4Address(last.strip() if dash else first.strip()))
    if found.last < found.first:
        raise ValueError(f"{text!r} ends before it begins")
    return found


@attrs.frozen
class AddressPool:
    """What addresses are given from. :ivar network: the port group's."""

    network: IPv4Network
    gateway: IPv4Address
    ranges: Sequence[AddressRange]

    def usable(self) -> list[IPv4Address]:
        """Return the addresses that a VM may have."""
        never = {self.gateway}
        if self.network.prefixlen < 31:
            never |= {self.network.network_address, self.network.broadcast_address}
        each = (
            IPv4Address(number)
            for found in self.ranges
            for number in range(int(found.first), int(found.last) + 1)
        )
        return [address for address in dict.fromkeys(each) if address not in never]

    def network_of(self, address: IPv4Address) -> Network:
        """Return the network settings of a VM with that address."""
        return Network(mac_of(address), f"{address}/{self.network.prefixlen}", str(self.gateway))


def mac_of(address: IPv4Address) -> str:
    """Return the hardware address of a card with that address: one of those that VMware leaves to its users.

    It never changes, so ARP caches do not go stale."""
    low = int(address)
    return f"00:50:56:{low >> 16 & 0x3F:02x}:{low >> 8 & 0xFF:02x}:{low & 0xFF:02x}"


@attrs.define
class _Lease:
    name: str  # the VM's name
    asked_at: float
    is_shown: bool = False
    lacked_since: float | None = None  # when lists began to lack the VM


class Leases:
    """One node's leases, each a file: named by the address, with the VM's name and whether it was shown.

    Methods block, and may be called by any thread.

    :param now: seconds since 1970."""

    def __init__(self, directory: Path, pool: AddressPool, now: Callable[[], float] = time.time) -> None:
        self.pool = pool
        self._directory = directory
        self._now = now
        self._usable = pool.usable()
        self._lock = threading.Lock()
        self._leases: dict[IPv4Address, _Lease] | None = None
        # The index of the last address given: an address that was given back is the last to be used again.
        self._last = -1

    def _thd_take(self, name: str) -> Network:
        """Return the network settings of a VM that is about to be asked for. Idempotent.

        :raise CloudError: there is no free address."""
        with self._lock:
            leases = self._thd_read()
            for address, lease in leases.items():
                if lease.name == name:
                    return self.pool.network_of(address)
            count = len(self._usable)
            for step in range(count):
                index = (self._last + 1 + step) % count
                address = self._usable[index]
                if address not in leases:
                    self._thd_write(leases, address, _Lease(name, self._now()))
                    self._last = index
                    return self.pool.network_of(address)
        raise CloudError(ErrorKind.QUOTA, f"all {count} addresses of address_ranges are taken")

    def _thd_give_back(self, name: str) -> None:
        """Free the address of a VM that does not exist any more. Idempotent."""
        with self._lock:
            leases = self._thd_read()
            for address in [address for address, lease in leases.items() if lease.name == name]:
                self._thd_remove(leases, address)

    def _thd_record_list(self, shown: Mapping[str, Set[IPv4Address]], launching: Set[str]) -> None:
        """Record which VMs exist, with their addresses. :param launching: VMs that may yet appear."""
        with self._lock:
            leases, now = self._thd_read(), self._now()
            for name, addresses in shown.items():
                for address in addresses & set(self._usable):
                    if address not in leases:
                        self._thd_note(leases, address, _Lease(name, now, is_shown=True))
            for address, lease in list(leases.items()):
                if lease.name in shown:
                    lease.lacked_since = None
                    if not lease.is_shown:
                        self._thd_note(leases, address, attrs.evolve(lease, is_shown=True))
                elif lease.name in launching:
                    lease.lacked_since = None
                elif lease.is_shown:
                    lease.lacked_since = lease.lacked_since or now
                    if now - lease.lacked_since >= LACKED_SECONDS:
                        self._thd_remove(leases, address)
                elif now - lease.asked_at >= ASKED_SECONDS:
                    self._thd_remove(leases, address)

    # ---- The directory

    def _thd_read(self) -> dict[IPv4Address, _Lease]:
        if self._leases is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found: dict[IPv4Address, _Lease] = {}
            for file in self._directory.iterdir():
                # The file is half written, so its address was never used.
                with contextlib.suppress(ValueError):
                    content = _CONTENT.fullmatch(file.read_text(errors="replace"))
                    name, is_shown = (content[1], content[2] is not None) if content else ("", False)
                    found[IPv4Address(file.name)] = _Lease(name, file.stat().st_mtime, is_shown)
            self._leases = found
            newest = max(found, key=lambda address: found[address].asked_at, default=None)
            if newest in self._usable:
                self._last = self._usable.index(newest)
        return self._leases

    def _thd_write(self, leases: dict[IPv4Address, _Lease], address: IPv4Address, lease: _Lease) -> None:
        try:
            shown = " shown" if lease.is_shown else ""
            replace_file(self._directory / str(address), f"{lease.name}{shown}\n")
        except OSError as error:
            raise CloudError(
                ErrorKind.TRANSIENT, f"the lease of {address} can't be recorded: {error}; see state_dir"
            ) from None
        leases[address] = lease

    def _thd_note(self, leases: dict[IPv4Address, _Lease], address: IPv4Address, lease: _Lease) -> None:
        """Record what a list has told. A full disk is ignored, as the next daemon gets a list as well."""
        leases[address] = lease
        try:
            self._thd_write(leases, address, lease)
        except CloudError as error:
            _log.warn("{error}", error=str(error))

    def _thd_remove(self, leases: dict[IPv4Address, _Lease], address: IPv4Address) -> None:
        try:
            (self._directory / str(address)).unlink(missing_ok=True)
        except OSError as error:
            _log.warn("the lease of {address} stays: {error}", address=str(address), error=str(error))
            return
        del leases[address]
