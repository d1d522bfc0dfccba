# SPDX-License-Identifier: Apache-2.0
"""A machine that is held neither sends nor receives: two pods may have its address until a clone has its own.

The kernel sends without any process: it repeats and acknowledges segments, and answers for its address. So
packets are dropped in the kernel, by tables that outlive the agent. Connections outlast that: their peers
repeat what they have sent.
"""

from __future__ import annotations

from typing import Protocol

from infranetes_common.nftables import Scripts
from infranetes_common.reactors import IReactor

TABLE = "infranetes-held"
_FIRST = -400  # before all other tables, and before connections are tracked


class ISilence(Protocol):
    """What keeps a machine silent."""

    async def begin(self, port: int) -> None:
        """Drop all packets, except those of the loopback interface. Idempotent.

        :param port: the agent's TCP port, whose packets pass; 0: it has none.
        :raise InfranetesError: the kernel refuses."""

    async def end(self) -> None:
        """Let packets pass again. Idempotent. :raise InfranetesError: the kernel refuses."""


class Silence:
    """The `ISilence` of a network namespace. :param namespace: its name; none: the process's own."""

    def __init__(self, reactor: IReactor, namespace: str = "") -> None:
        self._scripts = Scripts(reactor, namespace)

    async def begin(self, port: int) -> None:
        await self._scripts.run(tables(port))

    async def end(self) -> None:
        await self._scripts.run(_without())


class NoSilence:
    """The `ISilence` of a machine whose network is not the agent's to change."""

    async def begin(self, port: int) -> None:
        pass

    async def end(self) -> None:
        pass


def tables(port: int) -> str:
    """Return the script that replaces the tables."""
    arrives = f"tcp dport {port} accept" if port else ""
    leaves = f"tcp sport {port} accept" if port else ""
    inet = f"""table inet {TABLE} {{
chain input {{
    type filter hook prerouting priority {_FIRST}; policy drop;
    iifname "lo" accept
    {arrives}
}}
chain output {{
    type filter hook output priority {_FIRST}; policy drop;
    oifname "lo" accept
    {leaves}
}}
}}
"""
    arp = f"""table arp {TABLE} {{
chain input {{ type filter hook input priority 0; policy drop; }}
chain output {{ type filter hook output priority 0; policy drop; }}
}}
"""
    return _without() + inet + ("" if port else arp)


def _without() -> str:
    return "".join(
        f"table {family} {TABLE} {{}}\ndelete table {family} {TABLE}\n" for family in ("inet", "arp")
    )
