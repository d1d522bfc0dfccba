# SPDX-License-Identifier: Apache-2.0
"""Who was refused more than its share of what the node's kernel has once for all, and how often."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from infranetes.firewalls import fragments, shares
from infranetes.providers.interface import RefusedPackets, Share
from infranetes_common.commands import Command, check
from infranetes_common.reactors import IReactor

Counts = Mapping[str, Mapping[Share, int]]
"""How many packets were dropped, by address and share. Only what was dropped is there."""

_SECONDS = 15.0  # for each command
_TABLES = {Share.CONNECTIONS: shares, Share.NEIGHBOURS: shares, Share.FRAGMENTS: fragments}


async def read(reactor: IReactor, device: str) -> Counts:
    """Return the counts of the pods behind a device.

    :raise InfranetesError: they can't be read."""
    counts: dict[str, dict[Share, int]] = {}
    for share, table in _TABLES.items():
        command = ["nft", "-j", "list", "set", "ip", table.table_of(device), f"refused-{share.value}"]
        for each in json.loads(await check(reactor, Command(command, _SECONDS)))["nftables"]:
            for one in each.get("set", {}).get("elem", ()):
                counts.setdefault(one["elem"]["val"], {})[share] = one["elem"]["counter"]["packets"]
    return counts


def since(before: Counts, now: Counts) -> Mapping[str, Mapping[Share, RefusedPackets]]:
    """Return the counts, each with what came lately. One that is lower than before is of another pod."""
    refused: dict[str, dict[Share, RefusedPackets]] = {}
    for address, counts in now.items():
        for share, total in counts.items():
            had = before.get(address, {}).get(share, 0)
            refused.setdefault(address, {})[share] = RefusedPackets(
                total, total - had if had <= total else total
            )
    return refused


def used_up(refused: Mapping[Share, RefusedPackets]) -> Sequence[str]:
    """Return the shares that have been used up lately, each with the number of packets, for a message."""
    return [f"{share.value} ({each.lately} packets)" for share, each in refused.items() if each.lately]
