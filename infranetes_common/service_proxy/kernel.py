# SPDX-License-Identifier: Apache-2.0
"""The kernel's tables, through nftables' library and the programs `nft` and `conntrack`."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from twisted.logger import Logger

from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.nftables import Scripts
from infranetes_common.nftables_watch import Mend, TablesWatch, open_socket
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy import listing, script
from infranetes_common.service_proxy.rules import Key, Target

SECONDS = 60.0  # for a listing of everything in an emulated VM
MAX_LISTING = 64 << 20  # bytes; 10,000 rules with 5 endpoints each are listed in 5 MB
GIVEN_UP = 3  # failed listings in a row after which a table is made anew
MAX_FLOWS = 16 << 20
BYTES_PER_FLOW = 16 * 1024  # of the VM's memory; a flow takes about 300 bytes, and few VMs have that many
MIN_FLOWS, MOST_FLOWS = 32_768, 1_048_576
FLOWS_FILE = Path("/proc/sys/net/netfilter/nf_conntrack_count")
MAX_FLOWS_FILE = Path("/proc/sys/net/netfilter/nf_conntrack_max")

_FIELD = re.compile(r"(src|dst|dport)=(\S+)")
_log = Logger()


class Kernel:
    """The tables of a network namespace.

    :param namespace: its name; none: the process's own. :param opener: `open_socket` there.
    :param library: as `Scripts` has it.
    :ivar tables: which tables.
    """

    def __init__(
        self,
        reactor: IReactor,
        namespace: str = "",
        opener: Callable[[], socket.socket] = open_socket,
        tables: script.Tables = script.MACHINE,
        *,
        library: bool = True,
    ) -> None:
        self.tables = tables
        self._opener = opener
        self._reactor = reactor
        self._inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._scripts = Scripts(reactor, namespace, library=library)
        self._unread = 0  # failed listings in a row of a table that exists

    def watch(self, mend: Mend) -> TablesWatch:
        """Return a watch that calls `mend` when another program changes the tables."""
        tables = [(script.FAMILIES[version], self.tables.name) for version in self.tables.versions]
        return TablesWatch(self._reactor, tables, mend, self._opener)

    async def change(self, text: str) -> None:
        """Run a script, which is one transaction. :raise InfranetesError: why nft refuses it."""
        await self._scripts.run(text)

    async def read(self, version: int) -> listing.Listing | None:
        """Return the content of a family's table. None: there is no table, or it can't be parsed.

        :raise Unavailable: nft fails, as when memory is short: the table is there, and may be in force.
        """
        family = script.FAMILIES[version]
        command = [*self._inside, "nft", "list", "table", family, self.tables.name]
        found = await run(self._reactor, Command(command, SECONDS, most=MAX_LISTING))
        if found.code:
            tables = await check(
                self._reactor, Command([*self._inside, "nft", "list", "tables", family], SECONDS)
            )
            if f"table {family} {self.tables.name}".encode() not in tables.splitlines():
                return None
            self._unread += 1
            if self._unread < GIVEN_UP:
                raise Unavailable(f"the table {family} {self.tables.name} can't be listed: {found.message()}")
            _log.warn("the service proxy's table {family} is made anew: it can't be listed", family=family)
            return None
        self._unread = 0
        try:
            return listing.read(version, found.stdout.decode(errors="replace"))
        except listing.Unreadable as error:
            _log.warn("the service proxy's table {family} is made anew: {error}", family=family, error=error)
            return None

    async def forget_flows(self, changed: Mapping[Key, Collection[Target]]) -> None:
        """Remove UDP flows to endpoints that are gone from the kernel, which would keep sending there.

        Without the program conntrack, such a flow ends only after half a minute of silence.

        :param changed: the present endpoints of each key whose endpoints have changed.
        """
        wanted = {
            key: {each.address for each in its} for key, its in changed.items() if key.protocol == "udp"
        }
        if not wanted:
            return
        try:
            command = [*self._inside, "conntrack", "-L", "-p", "udp"]
            text = await check(self._reactor, Command(command, SECONDS))
            for address, port, reached in _flows(text.decode(errors="replace"), wanted):
                what = ["--orig-dst", address, "--orig-port-dst", str(port), "--reply-src", reached]
                await run(
                    self._reactor, Command([*self._inside, "conntrack", "-D", "-p", "udp", *what], SECONDS)
                )
        except InfranetesError as error:
            _log.warn("connections to endpoints that are gone may continue: {error}", error=error)

    async def addresses(self) -> list[str]:
        """Return the addresses of the tables' only client, this namespace; none: there may be several.

        :raise InfranetesError: why they are not known."""
        if self.tables.bridge:
            return []
        text = await check(self._reactor, Command([*self._inside, "ip", "-json", "address"], SECONDS))
        return [each["local"] for link in json.loads(text) for each in link.get("addr_info", ())]

    async def chain(self, key: Key) -> str | None:
        """Return where a key's connections go in the kernel. None: it has nothing for them."""
        for name in ("services", "refusals"):
            command = ["nft", "get", "element", script.FAMILIES[key.version], self.tables.name, name]
            found = await run(
                self._reactor, Command([*self._inside, *command, f"{{ {script.written(key)} }}"], SECONDS)
            )
            if not found.code:
                return listing.chain(found.stdout.decode(errors="replace"))
        return None

    async def counters(self, version: int) -> dict[str, int]:
        """Return the packets that a family's table has counted; nothing if it is not there."""
        family, name = script.FAMILIES[version], self.tables.name
        command = [*self._inside, "nft", "list", "counters", "table", family, name]
        found = await run(self._reactor, Command(command, SECONDS))
        return listing.counters("" if found.code else found.stdout.decode(errors="replace"))

    async def flows(self) -> tuple[int, int]:
        """Return how many connections the kernel follows, and how many it may; 0: that is not known."""
        return await run_in_thread(self._reactor, lambda: (_number(FLOWS_FILE), _number(MAX_FLOWS_FILE)))

    def thd_raise_limits(self, memory_bytes: int) -> None:
        """Let the kernel follow more connections than it does by default. Blocks. Idempotent."""
        wanted = min(max(memory_bytes // BYTES_PER_FLOW, MIN_FLOWS), MOST_FLOWS)
        try:
            if int(MAX_FLOWS_FILE.read_text()) < wanted:
                MAX_FLOWS_FILE.write_text(str(wanted))
        except (OSError, ValueError) as error:
            _log.warn(
                "{path} can't be raised to {wanted}: {error}", path=MAX_FLOWS_FILE, wanted=wanted, error=error
            )


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _flows(text: str, wanted: Mapping[Key, Collection[str]]) -> Iterator[tuple[str, int, str]]:
    """Yield address, port and reached endpoint of each listed flow that goes elsewhere than is wanted."""
    by_address = {(key.address, key.port): reached for key, reached in wanted.items()}
    for line in text.splitlines():
        fields = _FIELD.findall(line)
        if [name for name, _ in fields] == ["src", "dst", "dport"] * 2:
            (_, address), (_, port), (_, reached) = fields[1:4]
            allowed = by_address.get((address, int(port)))
            if allowed is not None and reached not in allowed:
                yield address, int(port), reached
