# SPDX-License-Identifier: Apache-2.0
"""Each pod's share of the node's connection table.

The kernel follows every connection that the node routes, in one table for all: when it is full, nobody
connects any more. A connection of a pod beyond its share is dropped before it has an entry. What was begun
and never answered is forgotten sooner than elsewhere, where the kernel can do that.

The nftables table is changed in place: with it, the count of each pod's connections would be lost.
"""

from __future__ import annotations

SHARE = 16384  # connections
_MOST_PODS = 65535
_HALF_OPEN_SECONDS = 20  # by default, the kernel waits for 120 and 60


def table_of(bridge: str) -> str:
    """Return the name of a bridge's table, of family `ip`."""
    return f"infranetes_{bridge}_shares"


def script(bridge: str, share: int) -> str:
    """Return the script that makes the table, or changes the one that is there."""
    table = table_of(bridge)
    device = f'"{bridge}"'
    chains = "".join(f"flush chain ip {table} {name}\n" for name in ("share", "forward", "input"))
    return f"""table ip {table} {{
        set connections {{ type ipv4_addr; size {_MOST_PODS}; flags dynamic; }}
        chain share {{ }}
        chain forward {{ type filter hook forward priority mangle; policy accept; }}
        chain input {{ type filter hook input priority mangle; policy accept; }}
    }}
    {chains}
    table ip {table} {{
        chain share {{
            add @connections {{ ip saddr ct count over {share} }} counter drop
        }}
        chain forward {{
            iifname {device} ct state new jump share
        }}
        chain input {{
            iifname {device} ct state new jump share
        }}
    }}
    """


def forgetting(bridge: str, address: str) -> list[tuple[list[str], str]]:
    """Return the commands, each with its input, that forget the connections that an address has begun.

    They fail where there are none."""
    element = f"delete element ip {table_of(bridge)} connections {{ {address} }}"
    return [(["conntrack", "-D", "-s", address], ""), (["nft", "-f", "-"], element)]


def half_open(bridge: str) -> str:
    """Return the script by which half-open connections are forgotten sooner.

    Kernels without CONFIG_NF_CONNTRACK_TIMEOUT refuse it."""
    table = table_of(bridge)
    return f"""table ip {table} {{
        ct timeout half-open {{
            protocol tcp;
            l3proto ip;
            policy = {{ syn_sent : {_HALF_OPEN_SECONDS}, syn_recv : {_HALF_OPEN_SECONDS} }};
        }}
        chain half-open {{ type filter hook forward priority -151; policy accept; }}
    }}
    flush chain ip {table} half-open
    add rule ip {table} half-open iifname "{bridge}" ct state new ip protocol tcp ct timeout set "half-open"
    add rule ip {table} half-open oifname "{bridge}" ct state new ip protocol tcp ct timeout set "half-open"
    """
