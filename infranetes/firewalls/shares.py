# SPDX-License-Identifier: Apache-2.0
"""Each pod's share of the tables that the node's kernel has once for all.

An nftables table for the pods behind one device, the bridge or the overlay's:

    connections   The kernel follows all that the node routes. A connection beyond the share is dropped before
                  it has an entry, and so is one beyond what all pods have together. What was begun and never
                  answered is forgotten sooner than elsewhere, where the kernel can do that.
    next hops     Each machine that the node sends packets to directly, such as those of its own networks,
                  takes an entry of the neighbour table, also where there is none. A pod that looks for many
                  is slowed down, except to those that have answered a pod.

Who was refused, and how often, is counted for each pod (`refusals`).

It is changed in place: with it, the count of each pod's connections would be lost.
"""

from __future__ import annotations

from pathlib import Path

SHARE = 16384  # connections
_MOST_PODS = 65535
# For each new connection the kernel walks all those that it is counted with: 4 ms for 16,384. So a pod's are
# counted in parts, by an id that the kernel gives to each and keeps to itself.
_PARTS, _PARTS_TOGETHER, _LEAST = 64, 1024, 256
_USUAL_TABLE = 262144  # entries
_HALF_OPEN_SECONDS = 20  # by default, the kernel waits for 120 and 60
_REFUSED = ("refused-connections", "refused-neighbours")
_CHAINS = ("share", "hop", "forward", "input")
# New next hops a second, at once, and how long each may be used without an answer: 124 at a time.
_HOPS, _HOPS_AT_ONCE, _HOP_SECONDS = 2, 64, 30


def table_of(device: str) -> str:
    """Return the name of a device's table, of family `ip`."""
    return f"infranetes_{device}_shares"


def together(proc_sys: Path) -> int:
    """Return how many connections all pods may have begun: the node keeps a quarter of its table. Blocks."""
    try:
        entries = int((proc_sys / "net/netfilter/nf_conntrack_max").read_text())
    except OSError:
        entries = _USUAL_TABLE
    return entries * 3 // 4


def script(device: str, share: int, together: int) -> str:
    """Return the script that makes the table, or changes the one that is there.

    :param share: the connections of one pod. :param together: of all of them."""
    table = table_of(device)
    pods = f'iifname "{device}"'
    parts, all_parts = _parts(share, _PARTS), _parts(together, _PARTS_TOGETHER)
    chains = "".join(f"flush chain ip {table} {name}\n" for name in _CHAINS)
    return f"""table ip {table} {{
        set begun {{ typeof ip saddr . ct id; size {_MOST_PODS * _PARTS}; flags dynamic; }}
        set begun-together {{ typeof ct id; size {_PARTS_TOGETHER}; flags dynamic; }}
        counter refused-together {{ }}
        set {_REFUSED[0]} {{ type ipv4_addr; size {_MOST_PODS}; flags dynamic; }}
        set {_REFUSED[1]} {{ type ipv4_addr; size {_MOST_PODS}; flags dynamic; }}
        set seekers {{ type ipv4_addr; size {_MOST_PODS}; flags dynamic, timeout; timeout 1m; }}
        set hops {{
            type ipv4_addr . ipv4_addr; size {_MOST_PODS}; flags dynamic, timeout; timeout {_HOP_SECONDS}s;
        }}
        set answered {{ type ipv4_addr; size {_MOST_PODS}; flags dynamic, timeout; timeout 5m; }}
        chain share {{ }}
        chain hop {{ }}
        chain forward {{ type filter hook forward priority mangle; policy accept; }}
        chain input {{ type filter hook input priority mangle; policy accept; }}
    }}
    {chains}
    table ip {table} {{
        chain share {{
            add @begun {{ ip saddr . ct id & {parts - 1} ct count over {share // parts} }} \
                update @refused-connections {{ ip saddr counter }} drop
            add @begun-together {{ ct id & {all_parts - 1} ct count over {together // all_parts} }} \
                counter name refused-together drop
        }}
        chain hop {{
            ip daddr @answered return
            ip saddr . rt ip nexthop @hops return
            update @seekers {{ ip saddr limit rate over {_HOPS}/second burst {_HOPS_AT_ONCE} packets }} \
                update @refused-neighbours {{ ip saddr counter }} drop
            add @hops {{ ip saddr . rt ip nexthop }}
        }}
        chain forward {{
            {pods} ct state new jump share
            {pods} oifname != "{device}" ct state != established jump hop
            oifname "{device}" ct direction reply ip saddr != @answered add @answered {{ ip saddr }}
        }}
        chain input {{
            {pods} ct state new jump share
        }}
    }}
    """


def _parts(share: int, most: int) -> int:
    """Return a power of two, as each part has a share of its own."""
    return min(1 << max(share // _LEAST, 1).bit_length() - 1, most)


def forgetting(device: str, address: str) -> list[tuple[list[str], str]]:
    """Return the commands, each with its input, that forget what an address has begun and was refused.

    They fail where there is nothing."""
    table = f"ip {table_of(device)}"
    parts = f"{table} begun {{ {', '.join(f'{address} . {part}' for part in range(_PARTS))} }}"
    elements = [f"add element {parts}\ndelete element {parts}"]
    elements += [f"delete element {table} {each} {{ {address} }}" for each in _REFUSED]
    return [(["conntrack", "-D", "-s", address], ""), *((["nft", "-f", "-"], each) for each in elements)]


def half_open(device: str) -> str:
    """Return the script by which half-open connections are forgotten sooner.

    Kernels without CONFIG_NF_CONNTRACK_TIMEOUT refuse it."""
    table, new = table_of(device), 'ct state new ip protocol tcp ct timeout set "half-open"'
    hooks = {
        "forward": ("half-open", f'meta iifname "{device}"', f'meta oifname "{device}"'),
        "input": ("half-open-input", f'meta iifname "{device}"'),
        "output": ("half-open-output", f'meta oifname "{device}"'),
    }
    chains = rules = ""
    for hook, (chain, *matches) in hooks.items():
        chains += f"chain {chain} {{ type filter hook {hook} priority -151; policy accept; }}\n"
        rules += f"flush chain ip {table} {chain}\n"
        rules += "".join(f"add rule ip {table} {chain} {match} {new}\n" for match in matches)
    return f"""table ip {table} {{
        ct timeout half-open {{
            protocol tcp;
            l3proto ip;
            policy = {{ syn_sent : {_HALF_OPEN_SECONDS}, syn_recv : {_HALF_OPEN_SECONDS} }};
        }}
        {chains}
    }}
    {rules}"""
