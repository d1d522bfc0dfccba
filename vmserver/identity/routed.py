# SPDX-License-Identifier: Apache-2.0
"""Set the addresses, routes and neighbours that another network's plug-in has chosen, by one run of `ip`.

They may be anything that a node's CNI gives its pods: an address of 32 bits, a router that only a route on
the link leads to, routes with an MTU, IPv6. ioctl can't express those. One child process takes some
milliseconds, and only such VMs pay them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.identity import Network, Route

_SECONDS = 60.0  # enough for an emulated VM
_PROC_SYS = Path("/proc/sys")


def apply(network: Network, card: str, proc_sys: Path = _PROC_SYS) -> None:
    """Give a card that is up exactly the settings of a checked `network`; ignore router advertisements.

    Idempotent. :raise FailedPrecondition: the machine refuses; the message says which line.
    """
    settings = proc_sys / "net/ipv6/conf" / card / "accept_ra"
    if settings.exists():
        settings.write_text("0")
    script = "".join(line + "\n" for line in lines(network, card))
    try:
        thd_check(Command(["ip", "-batch", "-"], _SECONDS, script.encode()))
    except InfranetesError as error:
        raise FailedPrecondition(
            f"the network's routes can't be set: {error}; of {script!r}"[:2000]
        ) from None


def lines(network: Network, card: str) -> Iterator[str]:
    """Yield the lines for `ip -batch`, in an order in which every step can be taken.

    The kernel derives no routes from the addresses, so the lines name every route.
    """
    for address in (network.address, *network.more):
        tentative = " nodad" if ":" in address else ""
        yield f"address replace {address} dev {card} noprefixroute{tentative}"
    for each in network.neighbours:
        yield f"neighbour replace {each.address} lladdr {each.mac} dev {card} nud permanent"
    # Routes without a router come first: the routers are reached by them.
    for route in sorted(network.routes, key=lambda route: route.via != ""):
        yield f"route replace {_words(route, card)}"


def _words(route: Route, card: str) -> str:
    words = [route.to]
    if route.via:
        words += ["via", route.via]
    words += ["dev", card]
    if route.onlink:
        words.append("onlink")
    if route.source:
        words += ["src", route.source]
    if route.mtu:
        words += ["mtu", str(route.mtu)]
    return " ".join(words)
