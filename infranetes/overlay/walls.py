# SPDX-License-Identifier: Apache-2.0
"""The firewalls of pods with addresses of the pods' network, at the node's end of their tunnels.

All traffic of such an address passes here, and the node accepts nothing else from the tunnel, so no guest can
bypass the firewall. A VM filters its traffic in the VPC itself.

The firewalls in force are also saved beside the daemon's records: the next daemon continues with them, even
after a reboot of the node. A pod without a firewall is closed.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.firewalls.pods import FirewallTables
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.nftables_watch import open_socket
from infranetes_common.pod_firewall import CLOSED, PodFirewall, decode, encode
from infranetes_common.reactors import IReactor

_SUFFIX = ".json"

_log = Logger()


@attrs.frozen
class _Pod:
    """A pod, as the key of its firewall."""

    address: str

    @property
    def name(self) -> str:
        return f"{int(IPv4Address(self.address)):08x}"


class OverlayFirewalls:
    """The firewalls of one node's overlay.

    :param device: the node's end of the tunnels. :param directory: where the firewalls are saved.
    :param enforcing: False: all pods are open, including those that an earlier daemon has closed.
    :param inside: the prefix of commands in the network namespace. :param opener: `open_socket` there.
    """

    def __init__(
        self,
        reactor: IReactor,
        device: str,
        directory: Path,
        enforcing: bool = True,
        inside: Sequence[str] = (),
        opener: Callable[[], socket.socket] = open_socket,
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._enforcing = enforcing
        table = f"infranetes_{device}_firewalls"
        self._firewalls: FirewallTables[_Pod] = FirewallTables(reactor, table, device, None, inside, opener)

    def watch(self) -> None:
        """Repair tables soon after another program has changed them, until `stop`. Idempotent."""
        if self._enforcing:
            self._firewalls.watch.begin()

    def stop(self) -> Deferred[None]:
        """Stop repairing tables, and fire when no repair is under way. Idempotent."""
        return self._firewalls.watch.end()

    async def restore(self, addresses: Mapping[str, str]) -> None:
        """Restore, after a start of the daemon, the firewalls of exactly these sandboxes.

        :param addresses: the pods' addresses, by sandbox.
        :raise InfranetesError: the firewalls are not in force."""
        if not self._enforcing:
            await self._firewalls.remove()
            return
        known = await run_in_thread(self._reactor, _load, self._directory, addresses)
        if addresses:
            await self._firewalls.set_up({_Pod(address): firewall for address, firewall in known.items()})
        else:
            await self.take_down()

    async def put_up(self) -> None:
        """Close every pod that has no firewall. Called before the first tunnel is made. Idempotent.

        :raise InfranetesError: the pods are not closed."""
        if self._enforcing:
            await self._firewalls.ensure()

    async def take_down(self) -> None:
        """Remove all firewalls, because no pod has an address. Idempotent."""
        await self._firewalls.remove()

    async def set(self, id: str, address: str, firewall: PodFirewall) -> None:
        """Put a sandbox's firewall in force, now and after a restart.

        :raise FailedPrecondition: firewalls are turned off. :raise Unavailable: the former one holds."""
        if not self._enforcing:
            raise FailedPrecondition("NetworkPolicies are turned off: kubernetes.network_policies is false")
        try:
            await self.put_up()
            await self._firewalls.keep(_Pod(address), firewall, functools.partial(_save, self._file(id)))
        except (InfranetesError, OSError) as error:
            raise Unavailable(f"the firewall of {address} is not in force: {error}") from error

    async def forget(self, id: str, address: str) -> None:
        """Close a sandbox's firewall and forget it. Idempotent.

        :raise InfranetesError: it failed; try again."""
        await self._firewalls.forget(_Pod(address))
        await run_in_thread(self._reactor, _remove, self._file(id))

    def _file(self, id: str) -> Path:
        return self._directory / f"{id}{_SUFFIX}"


def _load(directory: Path, addresses: Mapping[str, str]) -> dict[str, PodFirewall]:
    """Return the saved firewalls of these sandboxes, by address; remove the files of others. Blocks.

    A firewall that can't be read is CLOSED.

    :param addresses: the pods' addresses, by sandbox."""
    found = {}
    for path in directory.glob(f"*{_SUFFIX}"):
        address = addresses.get(path.name.removesuffix(_SUFFIX))
        if address is None:
            path.unlink(missing_ok=True)
            continue
        try:
            found[address] = decode(path.read_bytes())
        except (OSError, ValueError) as error:
            _log.error("{address} is closed: its firewall can't be read: {error}",
                       address=address, error=str(error))  # fmt: skip
            found[address] = CLOSED
    return found


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _save(path: Path, firewall: PodFirewall | None) -> None:
    """Save a firewall for the next daemon; None: remove the saved one. Blocks."""
    if firewall is None:
        _remove(path)
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, encode(firewall))
