# SPDX-License-Identifier: Apache-2.0
"""The agents' ports of VMs in networks of others, on the node: only the daemon itself reaches them.

There a VM's own kernel drops what is not from the node (`vmserver.identity.guard`). But who makes a Service
whose endpoint is the port of an agent has the node translate others' packets, and masquerade them: they would
be from the node. So an nftables table drops what the node forwards to these ports, of all but its own bridge,
which has such rules of its own, and the connections of the node's other programs (`machines.agent.marked`).
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.hostports.hostports import suffix_of
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import InfranetesError
from infranetes_common.identity import AGENT_CALL
from infranetes_common.reactors import IReactor

FAMILY = "inet"
_SECONDS = 15.0

_log = Logger()


def table_name(state_dir: Path) -> str:
    """Return the nftables table of the daemon that has this state directory."""
    return f"infranetes_agents_{suffix_of(state_dir)}"


class AgentPorts:
    """The table. It is replaced as a whole, in the background, and once for many changes.

    :param table: its name.
    """

    def __init__(self, reactor: IReactor, table: str) -> None:
        self._reactor = reactor
        self._table = table
        self._ports: dict[str, tuple[IPv4Address, int]] = {}  # by the VM's id
        self._in_force = script(table, {})
        self._trouble = ""
        self._lock = DeferredLock()

    def keep(self, id: str, host: str, port: int) -> None:
        """Forward nothing to the agent of a VM from now on. Idempotent."""
        try:
            address = IPv4Address(host)
        except ValueError:
            return
        if not address.is_loopback and self._ports.get(id) != (address, port):
            self._ports[id] = (address, port)
            start(self._apply())

    def release(self, id: str) -> None:
        """Forget a VM that is to end. Idempotent."""
        if self._ports.pop(id, None) is not None:
            start(self._apply())

    async def sweep(self) -> None:
        """Make the table again if another program has removed it, or it could not be made."""
        async with self._lock:
            if self._ports and not await self._is_there():
                self._in_force = ""
        await self._apply()

    async def _is_there(self) -> bool:
        command = ["nft", "--terse", "list", "table", FAMILY, self._table]
        try:
            return (await run(self._reactor, Command(command, _SECONDS))).code == 0
        except InfranetesError:  # `_apply` says why
            return False

    @deferred
    async def stop(self) -> None:
        """Wait for the last change. The table stays."""
        async with self._lock:
            pass

    async def _apply(self) -> None:
        async with self._lock:
            rules = script(self._table, self._ports)
            if rules == self._in_force:
                return
            try:
                await check(self._reactor, Command(["nft", "-f", "-"], _SECONDS, rules.encode()))
                self._in_force, self._trouble = rules, ""
            except InfranetesError as error:
                if str(error) != self._trouble:  # otherwise it is known
                    _log.warn(
                        "what the node forwards to the agents of its VMs is not dropped: {error}", error=error
                    )
                self._trouble = str(error)


def script(table: str, ports: Mapping[str, tuple[IPv4Address, int]]) -> str:
    """Return the script that replaces the table, or removes it if there are no ports."""
    emptied = f"table {FAMILY} {table} {{}}\ndelete table {FAMILY} {table}\n"
    if not ports:
        return emptied
    listed = ", ".join(sorted({f"{address} . {port}" for address, port in ports.values()}))
    return f"""{emptied}table {FAMILY} {table} {{
    set agents {{ type ipv4_addr . inet_service; elements = {{ {listed} }}; }}
    chain forward {{
        type filter hook forward priority mangle; policy accept;
        ip daddr . tcp dport @agents counter drop
    }}
    chain others {{
        type filter hook postrouting priority mangle; policy accept;
        ip daddr . tcp dport @agents {AGENT_CALL} counter drop
    }}
}}
"""
