# SPDX-License-Identifier: Apache-2.0
"""Set the addresses of the machine's network card, by ioctl: no child process, no wait.

A network that lists its routes is the exception: see `routed`.

Sources: netdevice(7); struct ifreq of <net/if.h>, struct rtentry of
<linux/route.h>. IPv4 only, as `infranetes_common.identity.Network` is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Network, check_network
from vmserver.identity import routed

SYS_NET = Path("/sys/class/net")

_SIOCADDRT, _SIOCDELRT = 0x890B, 0x890C
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFBRDADDR, _SIOCSIFNETMASK = 0x8916, 0x891A, 0x891C
_SIOCSIFMTU, _SIOCSIFHWADDR = 0x8922, 0x8924
_IFF_UP = 0x1
_RTF_UP, _RTF_GATEWAY = 0x1, 0x2
_ARPHRD_ETHER = 1
_ETH_P_ARP = 0x0806
_ANY = "0.0.0.0"  # noqa: S104  the default route's destination
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")


def first_card(sys_net: Path = SYS_NET) -> str:
    """Return the name of the first network card: an ethernet interface with a device behind it.

    :raise FailedPrecondition: there is none.
    """
    for interface in sorted(sys_net.iterdir()):
        with contextlib.suppress(OSError):
            if (interface / "device").exists() and int((interface / "type").read_text()) == _ARPHRD_ETHER:
                return interface.name
    raise FailedPrecondition("the machine has no network card; give it one")


def check(network: Network) -> tuple[bytes, ipaddress.IPv4Interface, ipaddress.IPv4Address | None]:
    """Return hardware address, address and gateway of `network`; None: it lists its routes.

    :raise InvalidArgument: one of them is malformed; names it.
    """
    if not isinstance(network.mac, str) or not _MAC.fullmatch(network.mac.lower()):
        raise InvalidArgument(f"network.mac {network.mac!r}: expected aa:bb:cc:dd:ee:ff")
    mac = bytes.fromhex(network.mac.replace(":", ""))
    if mac[0] & 1:
        raise InvalidArgument(f"network.mac {network.mac}: that is a multicast address")
    try:
        address = ipaddress.IPv4Interface(network.address)
        if network.routes and not network.gateway:
            check_network(network)
            return mac, address, None
        gateway = ipaddress.IPv4Address(network.gateway)
    except ValueError as error:
        raise InvalidArgument(f"network.address or network.gateway: {error}") from None
    if gateway not in address.network:
        raise InvalidArgument(f"network.gateway {gateway} is outside {address.network}")
    if not isinstance(network.mtu, int) or not 576 <= network.mtu <= 65535:
        raise InvalidArgument(f"network.mtu {network.mtu!r}: expected 576 to 65535")
    return mac, address, gateway


def apply(network: Network, interface: str = "") -> None:
    """Give the card these addresses and bring it up. Idempotent.

    :raise InvalidArgument: malformed. :raise FailedPrecondition: no such card. :raise OSError: refused.
    """
    mac, address, gateway = check(network)
    name = interface or first_card()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        card = _Card(control, name)
        card.hardware_address(mac)
        card.ioctl(_SIOCSIFMTU, struct.pack("i", network.mtu))
        card.flags(_IFF_UP)
        if gateway is None:
            routed.apply(network, name)
            return
        card.ioctl(_SIOCSIFADDR, _sockaddr(str(address.ip)))
        card.ioctl(_SIOCSIFNETMASK, _sockaddr(str(address.netmask)))
        card.ioctl(_SIOCSIFBRDADDR, _sockaddr(str(address.network.broadcast_address)))
        _default_route(control, str(gateway))
    _announce(name, mac, address.ip.packed)


class _Card:
    """One interface and its ioctls."""

    def __init__(self, control: socket.socket, name: str) -> None:
        self._control = control
        self._name = name
        if not (SYS_NET / name).exists():
            raise FailedPrecondition(f"the machine has no network card {name}; see identity.interface")

    def ioctl(self, request: int, argument: bytes) -> bytes:
        return fcntl.ioctl(self._control, request, struct.pack("16s24s", self._name.encode(), argument))

    def flags(self, on: int = 0, off: int = 0) -> None:
        (now,) = struct.unpack_from("H", self.ioctl(_SIOCGIFFLAGS, b""), 16)
        if (now | on) & ~off != now:
            self.ioctl(_SIOCSIFFLAGS, struct.pack("H", (now | on) & ~off))

    def hardware_address(self, mac: bytes) -> None:
        if (SYS_NET / self._name / "address").read_text().strip() == mac.hex(":"):
            return
        argument = struct.pack("H6s", _ARPHRD_ETHER, mac)
        try:
            self.ioctl(_SIOCSIFHWADDR, argument)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self.flags(off=_IFF_UP)  # this driver can't change the address while the card is up
            self.ioctl(_SIOCSIFHWADDR, argument)


def _sockaddr(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _default_route(control: socket.socket, gateway: str) -> None:
    def route(via: str, flags: int) -> bytes:
        addresses = (_sockaddr(_ANY), _sockaddr(via), _sockaddr(_ANY))
        return struct.pack("@L16s16s16sHhLPhPLLH", 0, *addresses, flags, 0, 0, 0, 0, 0, 0, 0, 0)

    while True:
        try:
            fcntl.ioctl(control, _SIOCDELRT, route(_ANY, _RTF_UP))
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
            break
    fcntl.ioctl(control, _SIOCADDRT, route(gateway, _RTF_UP | _RTF_GATEWAY))


def _announce(name: str, mac: bytes, address: bytes) -> None:
    """Send a gratuitous ARP (RFC 5227): neighbours that knew the address elsewhere learn where it is now."""
    everyone = b"\xff" * 6
    frame = everyone + mac + struct.pack(">HHHBBH", _ETH_P_ARP, 1, 0x0800, 6, 4, 1)
    frame += mac + address + bytes(6) + address
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW | os.O_NONBLOCK) as link:
        link.bind((name, _ETH_P_ARP))
        # The queue may be full, or the carrier missing: then the neighbours ask by themselves later.
        with contextlib.suppress(OSError):
            link.send(frame)
