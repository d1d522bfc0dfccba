# SPDX-License-Identifier: Apache-2.0
"""A VM's network for its guest: version 2 of cloud-init's format, and OpenStack's network_data.json."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import attrs

from infranetes.cloud_init.document import Resolvers
from infranetes.providers.machine_annotations import NetworkConfig
from infranetes_common.identity import Network, Route

_ID = "pod0"  # a name within the document; the interface keeps its own


def version_2(network: Network, config: NetworkConfig, resolvers: Resolvers) -> dict[str, object]:
    """Return cloud-init's network configuration.

    With DHCP only what DHCP for IPv4 can't say is in it: further addresses, and the routes of IPv6."""
    card: dict[str, object] = {"match": {"macaddress": network.mac.lower()}}
    addresses = [network.address, *network.more]
    routes = list(network.routes) or _default(network)
    if config is NetworkConfig.DHCP:
        card["dhcp4"] = True
        addresses = list(network.more)
        routes = [each for each in routes if ":" in each.to]
    if network.mtu != 1500:
        card["mtu"] = network.mtu
    if addresses:
        card["addresses"] = addresses
    said = _renderable(routes, addresses)
    for route in said:
        if route.to == "::/0":
            # As a route, cloud-init makes ::/64 of it for ifupdown and ifcfg.
            card["gateway6"] = route.via
    if said := [each for each in said if each.to != "::/0"]:
        card["routes"] = [_route(each) for each in said]
    if config is NetworkConfig.STATIC:
        card |= _nameservers(resolvers)
    return {"version": 2, "ethernets": {_ID: card}}


def network_data(network: Network, config: NetworkConfig, resolvers: Resolvers) -> dict[str, object]:
    """Return OpenStack's network_data.json. It has no words for routes without a router."""
    link = {"id": _ID, "type": "phy", "ethernet_mac_address": network.mac.lower(), "mtu": network.mtu}
    routes = list(network.routes) or _default(network)
    networks: list[dict[str, object]] = []
    for number, text in enumerate((network.address, *network.more)):
        interface = ipaddress.ip_interface(text)
        if config is NetworkConfig.DHCP and number == 0:
            networks.append({"id": "net0", "type": "ipv4_dhcp", "link": _ID, "network_id": "net0"})
            routes = [each for each in routes if ":" in each.to]
            continue
        mine = [each for each in routes if each.via and (":" in each.to) == (interface.version == 6)]
        routes = [each for each in routes if each not in mine]
        networks.append(
            {
                "id": f"net{number}",
                "type": f"ipv{interface.version}",
                "link": _ID,
                "network_id": f"net{number}",
                "ip_address": str(interface.ip),
                "netmask": str(interface.netmask),
                "routes": [_routed(each) for each in mine],
            }
        )
    services = [{"type": "dns", "address": each} for each in resolvers.servers]
    return {
        "links": [link],
        "networks": networks,
        "services": services if config is NetworkConfig.STATIC else [],
    }


def _default(network: Network) -> list[Route]:
    return [Route("0.0.0.0/0", network.gateway)] if network.gateway else []


def _renderable(routes: Sequence[Route], addresses: Sequence[str]) -> list[Route]:
    """Return the routes in the words that every renderer of cloud-init's has.

    The kernel has an address's subnet by itself. A route to nothing but a router becomes a word at the routes
    by that router: ifupdown's renderer fails as a whole where a route has no router."""
    known = {ipaddress.ip_interface(each).network for each in addresses}
    link = {ipaddress.ip_network(each.to) for each in routes if not each.via} - known
    routers = {ipaddress.ip_network(each.via): each.via for each in routes if each.via}
    found = []
    for route in routes:
        if route.via:
            onlink = route.onlink or ipaddress.ip_network(route.via) in link
            found.append(attrs.evolve(route, onlink=onlink))
        elif (to := ipaddress.ip_network(route.to)) not in known and to not in routers:
            found.append(route)
    return found


def _route(route: Route) -> dict[str, object]:
    found: dict[str, object] = {"to": route.to}
    if route.via:
        found["via"] = route.via
    else:
        found["scope"] = "link"
    if route.source:
        found["from"] = route.source
    if route.mtu:
        found["mtu"] = route.mtu
    if route.onlink:
        found["on-link"] = True
    return found


def _routed(route: Route) -> dict[str, object]:
    to = ipaddress.ip_network(route.to)
    return {"network": str(to.network_address), "netmask": str(to.netmask), "gateway": route.via}


def _nameservers(resolvers: Resolvers) -> dict[str, object]:
    found: dict[str, object] = {}
    if resolvers.servers:
        found["addresses"] = list(resolvers.servers)
    if resolvers.searches:
        found["search"] = list(resolvers.searches)
    return {"nameservers": found} if found else {}
