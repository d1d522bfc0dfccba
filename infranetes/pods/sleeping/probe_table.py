# SPDX-License-Identifier: Apache-2.0
"""The nftables tables of pods whose probes the node answers while they sleep.

- `asked` has the ports of pods that the node's own programs connect to, as kubelet does for its probes.
- `answered` has those whose connections this daemon takes now. Its elements end by themselves, so that
  nothing is led to where no daemon listens any more.
- `sent` counts what pods send to others than the node: probes' answers are not among it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from twisted.internet.defer import DeferredLock

from infranetes.hostports.hostports import suffix_of
from infranetes_common.commands import Command, check, run
from infranetes_common.reactors import IReactor

FAMILIES = ("ip", "bridge")
ANSWERED_SECONDS = 60  # for which an element of `answered` stays unless it is renewed
_MOST_ASKED = 4096
_SECONDS = 15.0  # for each command


def table_name(state_dir: Path) -> str:
    """Return the nftables tables of the daemon that has this state directory."""
    return f"infranetes_probes_{suffix_of(state_dir)}"


class ProbeTable:
    """The tables in the kernel. Pods are meant by their addresses."""

    def __init__(self, reactor: IReactor, name: str) -> None:
        self._reactor = reactor
        self._name = name
        self._lock = DeferredLock()

    async def make(self, pods: Collection[IPv4Address], port: int) -> None:
        """Make the tables anew. :param port: of 127.0.0.1, where the daemon takes connections.

        :raise InfranetesError: it failed; they are as they were."""
        await self._nft(script(self._name, pods, port))

    async def remove(self) -> None:
        """Remove the tables. Idempotent. :raise InfranetesError: they are still there."""
        await self._nft(emptied(self._name))

    async def put(self, pod: IPv4Address) -> None:
        """Follow one more pod. Idempotent. :raise InfranetesError: it is not followed."""
        await self._nft(_elements("add", self._name, pod))

    async def drop(self, pod: IPv4Address) -> None:
        """Follow a pod no more, which is followed. :raise InfranetesError: it still is."""
        await self._nft(_elements("delete", self._name, pod))

    async def asked(self, pod: IPv4Address) -> set[int]:
        """Return the TCP ports of a pod to which programs of the node have connected in the last day.

        :raise InfranetesError: they are not known."""
        return {
            port
            for address, port in _concatenated(await self._set("ip", "asked"))
            if address == str(pod) and isinstance(port, int)
        }

    async def answer(self, pod: IPv4Address, ports: Iterable[int]) -> None:
        """Take connections of the node's programs to these ports of a pod, for ANSWERED_SECONDS from now.

        :raise InfranetesError: they go to the pod."""
        if listed := ", ".join(f"{pod} . {port}" for port in sorted(ports)):
            one = f"element ip {self._name} answered {{ {listed} }}\n"
            # An element that is there keeps its time when it is added again.
            await self._nft(f"add {one}delete {one}add {one}")

    async def refrain(self, pod: IPv4Address, ports: Iterable[int]) -> None:
        """Take no more connections to these ports of a pod. Idempotent.

        :raise InfranetesError: some may still be taken."""
        if listed := ", ".join(f"{pod} . {port}" for port in sorted(ports)):
            one = f"element ip {self._name} answered {{ {listed} }}\n"
            await self._nft(f"add {one}delete {one}")

    async def sent(self) -> Mapping[str, int]:
        """Return how many packets each pod has sent to others than the node, by its address.

        :raise InfranetesError: they are not known."""
        counts: dict[str, int] = {}
        for family in FAMILIES:
            for each in await self._set(family, "sent"):
                counted = each["elem"]
                counts[counted["val"]] = counts.get(counted["val"], 0) + counted["counter"]["packets"]
        return counts

    async def is_there(self) -> bool:
        """Return whether no other program has removed the tables. :raise InfranetesError: can't say."""
        for family in FAMILIES:
            command = ["nft", "--terse", "list", "table", family, self._name]
            if (await run(self._reactor, Command(command, _SECONDS))).code != 0:
                return False
        return True

    async def _set(self, family: str, name: str) -> list[dict[str, Any]]:  # Any: nft's JSON
        listed = await check(
            self._reactor, Command(["nft", "-j", "list", "set", family, self._name, name], _SECONDS)
        )
        return [one for each in json.loads(listed)["nftables"] for one in each.get("set", {}).get("elem", ())]

    async def _nft(self, text: str) -> None:
        async with self._lock:
            await check(self._reactor, Command(["nft", "-f", "-"], _SECONDS, text.encode()))


def emptied(name: str) -> str:
    """Return the script that removes the tables."""
    return "".join(f"table {family} {name} {{}}\ndelete table {family} {name}\n" for family in FAMILIES)


def script(name: str, pods: Collection[IPv4Address], port: int) -> str:
    """Return the script that makes the tables anew."""
    elements = "".join(_elements("add", name, pod) for pod in sorted(pods))
    counted = f"""table bridge {name} {{
    set sent {{ type ipv4_addr; counter; }}
    chain sent {{
        type filter hook forward priority -199; policy accept;
        ip saddr @sent
    }}
}}
"""
    return f"""{emptied(name)}{counted}table ip {name} {{
    set pods {{ type ipv4_addr; }}
    set sent {{ type ipv4_addr; counter; }}
    set asked {{
        type ipv4_addr . inet_service
        size {_MOST_ASKED}
        flags dynamic, timeout
        timeout 1d
    }}
    set answered {{
        type ipv4_addr . inet_service
        flags timeout
        timeout {ANSWERED_SECONDS}s
    }}
    chain asked {{
        type filter hook output priority raw; policy accept;
        ip daddr @pods tcp flags & (syn | ack) == syn update @asked {{ ip daddr . tcp dport }}
    }}
    chain answered {{
        type nat hook output priority -101; policy accept;
        ip daddr . tcp dport @answered redirect to :{port}
    }}
    chain sent {{
        type filter hook forward priority raw; policy accept;
        ip saddr @sent
    }}
}}
{elements}"""


def _elements(verb: str, name: str, pod: IPv4Address) -> str:
    return "".join(
        f"{verb} element {family} {name} {each} {{ {pod} }}\n"
        for family, each in (("ip", "pods"), ("ip", "sent"), ("bridge", "sent"))
    )


def _concatenated(elements: Iterable[dict[str, Any]]) -> Iterator[list[Any]]:  # Any: nft's JSON
    for each in elements:
        value = each["elem"]["val"]
        if isinstance(value, dict) and isinstance(value.get("concat"), list):
            yield value["concat"]
