# SPDX-License-Identifier: Apache-2.0
"""The document that makes a freshly started machine one sandbox's VM.

It is JSON, and reaches the VM over the hypervisor's own channel: as one line over virtio-serial, as
user-data or guestinfo on clouds, otherwise as a file of mode 0600. It holds a private key, so it is never
logged, and no error quotes it. Its fields are applied as root, so both ends check each for type, length and
form.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from infranetes_common.errors import InvalidArgument

AGENT_PORT = 2475
"""The TCP port of the agents' TLS listeners, unless the node's configuration has another one."""
AGENT_MARK = 0x2000
"""The bit of the kernel's mark that packets of a node's daemon to agents have on the node. Neither kube-proxy
nor Calico, Cilium, Tailscale and the clouds' CNIs use it."""
AGENT_CALL = f"tcp flags & (syn | ack) == syn meta mark & {AGENT_MARK:#x} == 0"
"""Matches the first packet of a connection that is not the daemon's, in nft's words."""

MAX_DOCUMENT_BYTES = 64 * 1024
MAX_LIST = 64  # per list: routes, more, neighbours
_LISTS = ("routes", "more", "neighbours")


@attrs.frozen
class Route:
    """A route of the VM, through its first network card."""

    to: str  # a subnet: 10.88.0.0/16, 0.0.0.0/0, 2001:db8::/64
    via: str = ""  # a router's address of the same family; "": the subnet is on the link
    source: str = ""  # the address to send from; "": the kernel chooses
    mtu: int = 0  # bytes; 0: the link's MTU
    onlink: bool = False  # the router is on the link, whatever the other routes say


@attrs.frozen
class Neighbour:
    """A machine on the link that does not answer when it is asked for its hardware address."""

    address: str
    mac: str


@attrs.frozen
class Network:
    """Addresses for the VM's first network card; absent where the IaaS assigns them."""

    mac: str  # aa:bb:cc:dd:ee:ff
    address: str  # IPv4 with prefix length: 10.88.0.7/16
    gateway: str  # an address of the same subnet; "": `routes` has the routes
    mtu: int = 1500  # bytes, 576 to 65535
    # For a network other than the provider's own.
    routes: tuple[Route, ...] = ()  # all routes; empty: the address's subnet, and a default by the gateway
    more: tuple[str, ...] = ()  # further addresses with prefix lengths, of either family
    neighbours: tuple[Neighbour, ...] = ()


@attrs.frozen
class Identity:
    """One VM's identity. Certificates and key are PEM; the certificate is for `sandbox_id`."""

    sandbox_id: str  # a DNS label
    certificate_pem: str
    key_pem: str = attrs.field(repr=False)
    ca_pem: str
    listen: str = f"0.0.0.0:{AGENT_PORT}"  # IPv4:port or [IPv6]:port of the agent's TLS listener; 0: any port
    hostname: str = ""  # a DNS name of at most 64 characters; "": the machine keeps its own
    machine_id: str = ""  # 32 hex digits; "": the machine keeps its own
    entropy: str = attrs.field(default="", repr=False)  # hex, mixed into the kernel's pool
    now_nanos: int = 0  # the time to set the clock to, in nanoseconds since 1970 UTC; 0: leave the clock
    network: Network | None = None


def encode(identity: Identity) -> bytes:
    """Return the document: one line of JSON, newline included.

    :raise InvalidArgument: a field can't be applied; the message names it.
    """
    _check(identity)
    fields = attrs.asdict(identity)
    if fields["network"] is not None:
        for name in _LISTS:
            if not fields["network"][name]:
                del fields["network"][name]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def decode(document: bytes) -> Identity:
    """Return the identity in a document.

    :raise InvalidArgument: it is not such a document; the message never quotes it.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InvalidArgument(f"the identity document is over {MAX_DOCUMENT_BYTES} bytes")
    try:
        fields: dict[str, Any] = json.loads(document.decode())  # Any: not checked yet
        network = fields.pop("network", None)
        identity = Identity(**fields, network=None if network is None else _network(**network))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise InvalidArgument("the identity document is not the JSON object that the node writes") from None
    if not (identity.sandbox_id and identity.certificate_pem and identity.key_pem and identity.ca_pem):
        raise InvalidArgument("the identity document lacks the sandbox id, certificate, key or CA")
    _check(identity)
    return identity


def _network(
    *, routes: Sequence[Any] = (), more: Sequence[Any] = (), neighbours: Sequence[Any] = (), **fields: Any
) -> Network:  # Any: not checked yet
    lists = (routes, more, neighbours)
    if not all(isinstance(each, (list, tuple)) and len(each) <= MAX_LIST for each in lists):
        raise ValueError
    return Network(
        **fields,
        routes=tuple(Route(**each) for each in routes),
        more=tuple(more),
        neighbours=tuple(Neighbour(**each) for each in neighbours),
    )


# -- the form of each field, and the words for it in errors

_LABEL = r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_MAX_PEM = 16 * 1024
_MAX_CHAIN = 8


def _matches(pattern: str, most: int) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda value: len(value) <= most and compiled.fullmatch(value) is not None


def _pem(label: str, blocks: int) -> Callable[[str], bool]:
    """Match at most so many PEM blocks (RFC 7468), and nothing else."""
    block = rf"-----BEGIN {label}-----\n(?:[0-9A-Za-z+/=]{{1,76}}\n)+-----END {label}-----\n?"
    return _matches(rf"(?:{block}){{1,{blocks}}}", _MAX_PEM)


def _is_listen(value: str) -> bool:
    host, _, port = value.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        return False
    try:
        if host.startswith("[") and host.endswith("]"):
            return bool(ipaddress.IPv6Address(host[1:-1]).scope_id is None)
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_unicast_mac(value: str) -> bool:
    if not re.fullmatch(r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}", value):
        return False
    octets = bytes.fromhex(value.replace(":", ""))
    return any(octets) and not octets[0] & 1


_IDENTITY: dict[str, tuple[Callable[[str], bool], str]] = {
    "sandbox_id": (_matches(_LABEL, 63), "a DNS label"),
    "certificate_pem": (_pem("CERTIFICATE", _MAX_CHAIN), "PEM certificates"),
    "key_pem": (_pem("(?:EC |RSA )?PRIVATE KEY", 1), "a PEM private key"),
    "ca_pem": (_pem("CERTIFICATE", _MAX_CHAIN), "PEM certificates"),
    "listen": (_is_listen, "IPv4:port or [IPv6]:port"),
    "hostname": (_matches(rf"(?:{_LABEL}(?:\.{_LABEL})*)?", 64), "a DNS name of at most 64 characters"),
    "machine_id": (_matches(r"(?!0{32})[0-9a-f]{32}|", 32), "32 hex digits"),
    "entropy": (_matches(r"(?:[0-9a-f]{2})*", 4096), "at most 2048 bytes in hex digits"),
}
_MAX_NANOS = 2**63 - 1


def _check(identity: Identity) -> None:
    for name, (fits, words) in _IDENTITY.items():
        value = getattr(identity, name)
        if not (isinstance(value, str) and fits(value)):
            raise InvalidArgument(f"the identity's {name} is not {words}")
    if type(identity.now_nanos) is not int or not 0 <= identity.now_nanos <= _MAX_NANOS:
        raise InvalidArgument("the identity's now_nanos is not a time in nanoseconds")
    if identity.network is not None:
        check_network(identity.network)


def check_network(network: Network) -> None:
    """Check every field. :raise InvalidArgument: one can't be applied; the message names it."""
    if not (isinstance(network.mac, str) and _is_unicast_mac(network.mac)):
        raise InvalidArgument("the identity's network.mac is not a unicast MAC address")
    if type(network.mtu) is not int or not 576 <= network.mtu <= 65535:
        raise InvalidArgument("the identity's network.mtu is not a number from 576 to 65535")
    try:
        if not isinstance(network.address, str) or "/" not in network.address:
            raise ValueError
        interface = ipaddress.IPv4Interface(network.address)
    except ValueError:
        raise InvalidArgument(
            "the identity's network.address is not an IPv4 address with a prefix length"
        ) from None
    subnet = interface.network
    edges = (subnet.network_address, subnet.broadcast_address) if subnet.prefixlen < 31 else ()
    if interface.ip in edges or not _is_host(interface.ip):
        raise InvalidArgument("the identity's network.address is not one that a machine can have")
    _check_lists(network)
    if network.routes and network.gateway == "":
        return
    try:
        if not isinstance(network.gateway, str):
            raise ValueError
        gateway = ipaddress.IPv4Address(network.gateway)
    except ValueError:
        raise InvalidArgument("the identity's network.gateway is not an IPv4 address") from None
    if gateway == interface.ip or gateway in edges or gateway not in subnet:
        raise InvalidArgument("the identity's network.gateway is not another machine of its subnet")


def _check_lists(network: Network) -> None:
    for name in _LISTS:
        if len(getattr(network, name)) > MAX_LIST:
            raise InvalidArgument(f"the identity's network.{name} are more than {MAX_LIST}")
    if not all(map(_is_route, network.routes)):
        raise InvalidArgument("the identity's network.routes are not all routes")
    if not all(map(_is_interface, network.more)):
        raise InvalidArgument("the identity's network.more are not all addresses with prefix lengths")
    for each in network.neighbours:
        if _address(each.address) is None or not (isinstance(each.mac, str) and _is_unicast_mac(each.mac)):
            raise InvalidArgument("the identity's network.neighbours are not all machines")


def _is_route(route: Route) -> bool:
    try:
        if not isinstance(route.to, str) or "/" not in route.to:
            return False
        version = ipaddress.ip_network(route.to).version
    except ValueError:
        return False
    for text in (route.via, route.source):
        if text != "" and (found := _address(text)) is None:
            return False
        if text != "" and found is not None and found.version != version:
            return False
    if type(route.mtu) is not int or not (route.mtu == 0 or 576 <= route.mtu <= 65535):
        return False
    return type(route.onlink) is bool and (route.via != "" or not route.onlink)


def _is_interface(text: str) -> bool:
    if not isinstance(text, str) or "/" not in text:
        return False
    address, _, prefix = text.partition("/")
    found = _address(address)
    return (
        found is not None
        and re.fullmatch(r"[0-9]{1,3}", prefix) is not None
        and (int(prefix) <= found.max_prefixlen)
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address of one machine; None if `text` is none."""
    if not isinstance(text, str) or "%" in text:
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return address if _is_host(address) else None


def _is_host(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if address.is_multicast or address.is_loopback or address.is_unspecified:
        return False
    return address.version == 6 or not address.is_reserved


_CLOCK = b"clock "


def encode_clock(now_nanos: int) -> bytes:
    """Return one line that sets the clock of a VM which has its identity already.

    It is short, so that no time passes while it is sent and read.

    :param now_nanos: nanoseconds since 1970 UTC.
    """
    return _CLOCK + str(now_nanos).encode() + b"\n"


def decode_clock(document: bytes) -> int | None:
    """Return the time in a line made by `encode_clock`; None if the document is another one.

    :raise InvalidArgument: the line has no time.
    """
    if not document.startswith(_CLOCK):
        return None
    digits = document[len(_CLOCK) :].strip()
    if not (digits.isdigit() and len(digits) <= 19):
        raise InvalidArgument("a clock line without a time")
    return int(digits)
