# SPDX-License-Identifier: Apache-2.0
"""The DHCP servers of all VMs: who is served, now and by the next daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.providers.interface import Attachment
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.lease import Lease
from infranetes.providers.qemu.dhcp.lease6 import Lease6
from infranetes.providers.qemu.dhcp.server import Server
from infranetes.providers.qemu.dhcp.tap import tap_for
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import KeyedLock, replace_file, run_in_thread, settled, start
from infranetes_common.errors import Unavailable
from infranetes_common.identity import Network
from infranetes_common.reactors import IReactor

_FILE = "dhcp.json"  # in the VM's directory
_log = Logger()


@attrs.frozen
class Guest:
    """A VM that is told its network.

    :ivar attachment: where its tap is; None: in the node's own network namespace.
    :ivar directory: the VM's own, in which it is remembered what the VM is told."""

    tap: str
    attachment: Attachment | None
    directory: Path


@attrs.frozen
class Told:
    """What a VM is told, and whether it has taken its address."""

    names: Names
    address_taken: bool = False


class Servers:
    """Serves VMs, each on its own tap."""

    def __init__(self, reactor: IReactor, namespaces: Namespaces) -> None:
        self._reactor = reactor
        self._namespaces = namespaces
        self._servers: dict[str, Server] = {}
        self._in_work: KeyedLock[str] = KeyedLock()

    async def serve(self, guest: Guest, network: Network, names: Names) -> None:
        """Tell a VM its network, from now on, until `stop`. Idempotent; what it is told may change.

        :param guest: its tap is connected.
        :raise InfranetesError: it can't be told.
        """
        async with self._in_work.held(guest.tap):
            known = self._servers.get(guest.tap)
            told = Told(names, known is not None and known.has_address)
            await run_in_thread(self._reactor, _save, guest.directory, told)
            await self._serve(guest, network, told)

    async def resume(self, guest: Guest, network: Callable[[], Awaitable[Network]]) -> None:
        """Serve a VM again if an earlier daemon served it. Idempotent.

        :param network: looks up the VM's network.
        :raise InfranetesError: as `serve`."""
        async with self._in_work.held(guest.tap):
            told = await run_in_thread(self._reactor, _load, guest.directory)
            if told is not None:
                await self._serve(guest, await network(), told)

    async def stop(self, tap: str) -> None:
        """Serve a VM no more. Idempotent."""
        async with self._in_work.held(tap):
            server = self._servers.pop(tap, None)
            if server is not None:
                await server.stop()

    async def close(self) -> None:
        """Serve nobody any more. The next daemon may resume."""
        await settled([start(self.stop(tap)) for tap in list(self._servers)])

    def has_address(self, tap: str) -> bool:
        """Return whether a VM has asked for its address and was given it, by whichever daemon."""
        server = self._servers.get(tap)
        return server is not None and server.has_address

    async def _serve(self, guest: Guest, network: Network, told: Told) -> None:
        lease, lease6 = Lease(network, told.names), Lease6(network, told.names)
        # On the bridge there is no IPv6.
        known6 = lease6 if guest.attachment is not None and lease6.is_any else None
        running = self._servers.get(guest.tap)
        if running is not None:
            running.lease, running.lease6 = lease, known6
            return
        name = tap_for(guest.tap)
        descriptor = await self._opened(name)
        try:
            await self._namespaces.divert_dhcp(guest.attachment, guest.tap, name)
        except BaseException:
            await run_in_thread(self._reactor, os.close, descriptor)
            raise
        taken = partial(self._note_taken, guest, told)
        server = self._servers[guest.tap] = Server(self._reactor, guest.tap, descriptor, lease, known6, taken)
        server.has_address = told.address_taken
        server.start()

    def _note_taken(self, guest: Guest, told: Told) -> None:
        """Let the next daemon know that a VM has its address."""
        saving = start(
            run_in_thread(self._reactor, _save, guest.directory, attrs.evolve(told, address_taken=True))
        )
        # The VM may just be removed.
        words = "that {tap} has its address is not saved: {error}"
        saving.addErrback(lambda failure: _log.info(words, tap=guest.tap, error=failure.getErrorMessage()))

    async def _opened(self, name: str) -> int:
        try:
            return await run_in_thread(self._reactor, open_tap, name)
        except OSError as error:
            raise Unavailable(f"a VM can't be told its network by DHCP: {name}: {error.strerror}") from error


def _save(directory: Path, told: Told) -> None:
    """Save what a VM is told, for the next daemon. Blocks."""
    replace_file(directory / _FILE, json.dumps(attrs.asdict(told)), durable=False)


def _load(directory: Path) -> Told | None:
    """Load what a VM is told; None: it is not served. Blocks."""
    try:
        saved = json.loads((directory / _FILE).read_bytes())
        names = saved["names"]
        return Told(
            Names(str(names["hostname"]), tuple(names["servers"]), tuple(names["searches"])),
            bool(saved["address_taken"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.error("the VM in {directory} is told no names by DHCP: {error}",
                   directory=directory, error=error)  # fmt: skip
        return Told(Names())
