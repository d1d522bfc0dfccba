# SPDX-License-Identifier: Apache-2.0
"""What a frame that is sent to a VM which sleeps asks for.

frame                                               what is done
ARP's question for an address of the VM             is answered, with the VM's hardware address
IPv6's question for an address of the VM            the VM is called, and answers by itself
another one to the VM's hardware address            the VM is called
all others: broadcasts, multicasts                  nothing

The answer is needed: whoever does not know the hardware address sends no packet. It does not call the VM,
since nodes and pods ask again and again for addresses that they have used once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

import attrs

_ETHERNET, _ARP = 14, 28  # bytes: of a header, and of a question in it
_TYPE_ARP, _TYPE_IPV4, _TYPE_IPV6 = b"\x08\x06", b"\x08\x00", b"\x86\xdd"
_ETHERNET_IPV4 = b"\x00\x01\x08\x00\x06\x04"  # hardware and protocol, and the lengths of their addresses
_QUESTION, _ANSWER = b"\x00\x01", b"\x00\x02"
_ICMP6, _SOLICITATION = 58, 135
_TARGET = slice(_ETHERNET + 40 + 8, _ETHERNET + 40 + 24)  # of a solicitation behind a header of IPv6


class Call(enum.Enum):
    """The answer to a frame that calls the VM."""

    CALL = "call"


@attrs.frozen
class Sleeping:
    """A VM that sleeps, as the network knows it. :ivar mac: its hardware address, 6 bytes."""

    mac: bytes
    fourth: frozenset[bytes]
    sixth: frozenset[bytes]

    @classmethod
    def of(cls, mac: str, addresses: Iterable[str]) -> Sleeping:
        """Return it. :param mac: as aa:bb:cc:dd:ee:ff."""
        parsed = [ip_address(each) for each in addresses]
        return cls(
            bytes.fromhex(mac.replace(":", "")),
            frozenset(each.packed for each in parsed if isinstance(each, IPv4Address)),
            frozenset(each.packed for each in parsed if isinstance(each, IPv6Address)),
        )

    def heard(self, frame: bytes) -> bytes | Call | None:
        """Return the frame that answers, or that the VM is called; None: neither."""
        kind = frame[12:14]
        if kind == _TYPE_ARP:
            return self._arp(frame)
        if kind == _TYPE_IPV6 and frame[:1] == b"\x33":
            return Call.CALL if self._asks_for_it(frame) else None
        return Call.CALL if frame[:6] == self.mac and kind in (_TYPE_IPV4, _TYPE_IPV6) else None

    def _arp(self, frame: bytes) -> bytes | None:
        question = frame[_ETHERNET : _ETHERNET + _ARP]
        if question[:6] != _ETHERNET_IPV4 or question[6:8] != _QUESTION:
            return None
        sender, target = question[8:18], question[24:28]
        if target not in self.fourth or sender[6:] in self.fourth:
            return None
        header = frame[6:12] + self.mac + _TYPE_ARP
        return header + _ETHERNET_IPV4 + _ANSWER + self.mac + target + sender

    def _asks_for_it(self, frame: bytes) -> bool:
        inner = frame[_ETHERNET:]
        asks = inner[6:7] == bytes([_ICMP6]) and inner[40:41] == bytes([_SOLICITATION])
        return asks and frame[_TARGET] in self.sixth
