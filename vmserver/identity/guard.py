# SPDX-License-Identifier: Apache-2.0
"""The rule that keeps the agent's port for its node, where nothing outside of the VM does.

On a node's own bridge the node drops all others' packets. In a cloud's network, in an overlay and in a CNI's
network the VM's kernel does, by a table that is in force before the agent listens. The VM's certificate says
which addresses the node has. Behind a NAT or with a new address, the node seems to be somebody else:

    state   the node's connection                    whose packets get to the agent
    SHUT    is open, or was a moment ago             those of the addresses that the certificate names, and of
                                                     those that have shown the node's certificate
    AJAR    there has been none for AJAR_SECONDS     also one new connection a second of each other address

What comes by an overlay's tunnel is never the node's: its connection goes to the VM's own address.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from infranetes_common.addresses import Network, nft_address
from infranetes_common.commands import Command, run
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError
from infranetes_common.nftables import SECONDS, Scripts
from infranetes_common.nftables_watch import TablesWatch, open_socket
from infranetes_common.reactors import IReactor
from vmserver.identity.callers import TRUSTED, address_of
from vmserver.network.pod_tunnel import DEVICE

FAMILY, TABLE = "inet", "infranetes-agent"
AJAR_SECONDS = 5.0
_STRANGERS = 4096  # addresses that are counted while it is ajar; those of others are dropped

_log = Logger()


class PortGuard:
    """The guard of the port in one network namespace.

    :ivar watch: once begun, it soon restores a table that another program has changed.
    :param namespace: its name; by default the process's own. :param opener: `open_socket` there.
    """

    def __init__(
        self, reactor: IReactor, namespace: str = "", opener: Callable[[], socket.socket] = open_socket
    ) -> None:
        self._reactor = reactor
        self._inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._scripts = Scripts(reactor, namespace)
        self._lock = DeferredLock()
        self._port = 0
        self._named: Sequence[Network] = ()
        self._shown: dict[Network, None] = {}  # have shown the node's certificate, the last one last
        self._connected = False
        self._ajar = False
        self._timer: IDelayedCall | None = None
        self._script = ""  # the one in force
        self._listing = b""
        self.watch = TablesWatch(reactor, [(FAMILY, TABLE)], self.mend, opener)

    async def shut(self, port: int, node: Sequence[Network]) -> None:
        """Keep a port for these addresses from now on; none: for nobody. Never fails: it is logged.

        Called before the agent listens, and again when it has a certificate with other addresses."""
        self._port, self._named = port, node
        await self._enforce()
        self._wait()

    def connected(self, host: str) -> None:
        """Note that an address has shown the node's certificate."""
        self._connected = True
        self._stop_waiting()
        address = address_of(host)
        known = address is None or any(address in each for each in (*self._named, *self._shown))
        if address is not None and not known:
            self._shown[ip_network(address)] = None
            if len(self._shown) > TRUSTED:
                del self._shown[next(iter(self._shown))]
        if self._ajar or not known:
            self._ajar = False
            start(self._enforce())

    def lost(self) -> None:
        """Note that the last of the node's connections is gone."""
        self._connected = False
        self._wait()

    def stop(self) -> None:
        """Let the rule stay as it is from now on. Idempotent."""
        self._port = 0
        self._stop_waiting()

    async def prepare(self) -> None:
        """Do nothing: what there is to guard is known with the identity."""

    async def mend(self, changed: bool = False) -> None:
        """Restore the table if another program has changed it, or the kernel refused it before.

        :param changed: the kernel has told of a change. The table may have been looked at only after it.
        """
        async with self._lock:
            if self._script and (changed or not (listed := await self._listed()) or listed != self._listing):
                _log.warn("the rule that keeps the agent's port was changed by somebody else; it is restored")
                await self._apply(self._script)
        await self._enforce()

    def _wait(self) -> None:
        """Begin to wait for the node, unless it is there."""
        if self._port and not self._connected and not self._ajar and self._timer is None:
            self._timer = self._reactor.callLater(AJAR_SECONDS, self._open)

    def _stop_waiting(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _open(self) -> None:
        self._timer, self._ajar = None, True
        start(self._enforce())

    async def _enforce(self) -> None:
        async with self._lock:
            if not self._port:
                return
            script = table(self._port, (*self._named, *self._shown), self._ajar)
            if script == self._script:
                return
            try:
                await self._apply(script)
            except InfranetesError as error:
                _log.error(
                    "the kernel does not keep the agent's port for the node; others' connections are limited "
                    "by the agent alone: {error}",
                    error=error,
                )

    async def _apply(self, script: str) -> None:
        with self.watch.ours():
            await self._scripts.run(script)
        self._script = script
        start(self._note())  # later: the agent waits for the rule alone, before it listens

    async def _note(self) -> None:
        async with self._lock:
            self._listing = await self._listed()

    async def _listed(self) -> bytes:
        command = [*self._inside, "nft", "--terse", "--stateless", "list", "table", FAMILY, TABLE]
        listing = await run(self._reactor, Command(command, SECONDS))
        return listing.stdout if listing.code == 0 else b""


def table(port: int, node: Iterable[Network], ajar: bool) -> str:
    """Return the script that replaces the table."""
    node = list(node)
    sets = known = strangers = ""
    for version, family, caller in (
        (4, "ip", "ip saddr"),
        (6, "ip6", "ip6 saddr & ffff:ffff:ffff:ffff::"),  # as `callers` counts them
    ):
        named = ", ".join(nft_address(each) for each in _collapsed(node, version))
        known += f"{family} saddr {{ {named} }} accept\n" if named else ""
        if ajar:
            name = f"strangers{version}"
            kind = f"type ipv{version}_addr; flags dynamic, timeout; timeout 1m; size {_STRANGERS};"
            sets += f"set {name} {{ {kind} }}\n"
            strangers += f"add @{name} {{ {caller} limit rate 1/second burst 3 packets }} accept\n"
    begun = "tcp flags & (syn | ack) != syn accept" if ajar else ""
    return f"""table {FAMILY} {TABLE} {{}}
delete table {FAMILY} {TABLE}
table {FAMILY} {TABLE} {{
{sets}
chain input {{
    type filter hook input priority -10; policy accept;
    tcp dport {port} goto agent
}}
chain agent {{
    iifname "{DEVICE}" drop
    {known}
    {begun}
    {strangers}
    counter drop
}}
}}
"""


def _collapsed(networks: Iterable[Network], version: int) -> Iterable[Network]:
    """Return the networks of one version, none of which overlap."""
    if version == 4:
        return collapse_addresses(each for each in networks if isinstance(each, IPv4Network))
    return collapse_addresses(each for each in networks if isinstance(each, IPv6Network))
