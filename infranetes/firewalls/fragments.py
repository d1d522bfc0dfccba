# SPDX-License-Identifier: Apache-2.0
"""Each pod's share of the memory in which the node's kernel keeps fragments of IPv4 packets.

The kernel keeps the fragments of a datagram until it is whole, for 30 seconds at most, in one memory
(net.ipv4.ipfrag_high_thresh): when that is full, all fragments are dropped. A pod's datagram that is not
whole yet has one of the pod's places, by its identification, and a number of fragments; the others are
dropped. Once it is whole, its place is free. As fragments mostly come right after one another, honest senders
hardly notice.

An nftables table for the pods behind one device, the bridge or the overlay's. Two chains see what they
send, before and after the kernel puts fragments together. Only fragments bear a mark when they reach the
second one, `whole`. Otherwise a pod could free a place by a packet with the same identification, while the
kernel keeps the fragments.

It is changed in place: with it, what pods have of the memory would be forgotten.
"""

from __future__ import annotations

MEMORY = 128 << 20  # bytes for fragments that the kernel should have at least; the worst of a pod are 3.4 MiB
_PLACES = 32  # for datagrams that are not whole; a power of two
_PIECES = 48  # fragments of each: 64 KiB at the MTU of Ethernet, less what a tunnel takes
_SECONDS = 30  # net.ipv4.ipfrag_time
_DATAGRAM = "ip daddr . ip id . ip protocol"  # of one pod
_PLACE = f"ip id & {_PLACES - 1}"
# More than are in use, since the kernel forgets elements that are deleted only once a second.
_MOST_DATAGRAMS, _MOST_PLACES = 65536, 131072
_MOST_PODS = 65535
_MARK = "0x20000000"  # set only between the two chains


def table_of(device: str) -> str:
    """Return the name of a device's table, of family `ip`."""
    return f"infranetes_{device}_fragments"


def script(device: str) -> str:
    """Return the script that makes the table, or changes the one that is there."""
    table = table_of(device)
    chains = "".join(f"flush chain ip {table} {name}\n" for name in ("fragments", "whole", "refused"))
    return f"""table ip {table} {{
        set refused-fragments {{ type ipv4_addr; size {_MOST_PODS}; flags dynamic; }}
        map pods {{ type ipv4_addr : verdict; }}
        chain fragments {{ type filter hook prerouting priority -450; policy accept; }}
        chain whole {{ type filter hook prerouting priority -399; policy accept; }}
        chain refused {{ }}
    }}
    {chains}
    table ip {table} {{
        chain fragments {{
            iifname "{device}" ip frag-off & 0x3fff != 0 \
                meta mark set meta mark | {_MARK} ip saddr vmap @pods
        }}
        chain whole {{
            iifname "{device}" meta mark & {_MARK} != 0 \
                meta mark set meta mark ^ {_MARK} ip saddr vmap @pods
        }}
        chain refused {{
            update @refused-fragments {{ ip saddr counter }} drop
        }}
    }}
    """


def add(device: str, address: str) -> str:
    """Return the script that gives a pod its share. Idempotent."""
    table = table_of(device)
    datagrams, places, fragment, whole = _own(address)
    timeout = f"flags dynamic, timeout; timeout {_SECONDS}s;"
    return f"""table ip {table} {{
        set {datagrams} {{ typeof {_DATAGRAM}; size {_MOST_DATAGRAMS}; {timeout} }}
        set {places} {{ typeof ip id; size {_MOST_PLACES}; {timeout} }}
        chain {fragment} {{ }}
        chain {whole} {{ }}
    }}
    flush chain ip {table} {fragment}
    flush chain ip {table} {whole}
    table ip {table} {{
        chain {fragment} {{
            ip frag-off & 0x3fff == 0 goto {whole}
            {_DATAGRAM} != @{datagrams} {_PLACE} @{places} goto refused
            add @{datagrams} {{ {_DATAGRAM} limit rate over 1/day burst {_PIECES} packets }} goto refused
            {_DATAGRAM} != @{datagrams} goto refused
            add @{places} {{ {_PLACE} }}
        }}
        chain {whole} {{
            delete @{datagrams} {{ {_DATAGRAM} }} delete @{places} {{ {_PLACE} }}
        }}
    }}
    add element ip {table} pods {{ {address} : jump {fragment} }}
    """


def delete(device: str, address: str) -> str:
    """Return the script that removes a pod's sets and chains. It fails where `add` has not made them."""
    table = table_of(device)
    datagrams, places, fragment, whole = _own(address)
    return f"""delete element ip {table} pods {{ {address} }}
    flush chain ip {table} {fragment}
    delete chain ip {table} {fragment}
    delete chain ip {table} {whole}
    delete set ip {table} {datagrams}
    delete set ip {table} {places}
    add element ip {table} refused-fragments {{ {address} }}
    delete element ip {table} refused-fragments {{ {address} }}
    """


def _own(address: str) -> list[str]:
    """Return the names of a pod's own sets and chains."""
    return [f"{name}-{address}" for name in ("datagrams", "places", "fragment", "whole")]
