# SPDX-License-Identifier: Apache-2.0
"""The DHCP servers of all VMs: who is served, now and by the next daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.providers.interface import Attachment
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.lease import Lease
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
            await run_in_thread(self._reactor, _save, guest.directory, names)
            await self._serve(guest, network, names)

    async def resume(self, guest: Guest, network: Callable[[], Awaitable[Network]]) -> None:
        """Serve a VM again if an earlier daemon served it. Idempotent.

        :param network: looks up the VM's network.
        :raise InfranetesError: as `serve`."""
        async with self._in_work.held(guest.tap):
            names = await run_in_thread(self._reactor, _load, guest.directory)
            if names is not None:
                await self._serve(guest, await network(), names)

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
        """Return whether a VM has asked this daemon for its address, and was given it."""
        server = self._servers.get(tap)
        return server is not None and server.has_address

    async def _serve(self, guest: Guest, network: Network, names: Names) -> None:
        lease = Lease(network, names)
        running = self._servers.get(guest.tap)
        if running is not None:
            running.lease = lease
            return
        name = tap_for(guest.tap)
        descriptor = await self._opened(name)
        try:
            await self._namespaces.divert_dhcp(guest.attachment, guest.tap, name)
        except BaseException:
            await run_in_thread(self._reactor, os.close, descriptor)
            raise
        server = self._servers[guest.tap] = Server(self._reactor, guest.tap, descriptor, lease)
        server.start()

    async def _opened(self, name: str) -> int:
        try:
            return await run_in_thread(self._reactor, open_tap, name)
        except OSError as error:
            raise Unavailable(f"a VM can't be told its network by DHCP: {name}: {error.strerror}") from error


def _save(directory: Path, names: Names) -> None:
    """Save what a VM is told, for the next daemon. Blocks."""
    replace_file(directory / _FILE, json.dumps(attrs.asdict(names)), durable=False)


def _load(directory: Path) -> Names | None:
    """Load what a VM is told; None: it is not served. Blocks."""
    try:
        saved = json.loads((directory / _FILE).read_bytes())
        return Names(str(saved["hostname"]), tuple(saved["servers"]), tuple(saved["searches"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.error(
            "the VM in {directory} is told no names by DHCP: {error}", directory=directory, error=error
        )
        return Names()
