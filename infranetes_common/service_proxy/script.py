# SPDX-License-Identifier: Apache-2.0
"""Scripts for `nft`: the tables, and changes of their content. Each script is one transaction.

The tables translate what the machine itself sends, as a VM's do, or what comes in by a bridge, as a node's
for VMs that have none. There is a table for each family, with

map services         an address, protocol and port → the chain that chooses an endpoint's number
map endpoints        an address, protocol, port and number → an endpoint
map numbers          an address, protocol, port and place in a row → a number; for chains keep-N-S alone
map affinity         an address, protocol and port → the number that was chosen last, for some time; for a
                     bridge, by the client's address, too
map refusals         an address, protocol and port without endpoints → the chain that refuses or drops
set cluster-ips      addresses of which all other ports are refused
chain ranges         drops packets to addresses of the Services' ranges that no Service has
chain spread-N       chooses one of the numbers below N
chain keep-N-S       chooses one of N numbers, or goes on with the last one if that was S seconds ago at most
counter refused      packets that were refused; counter dropped: that were dropped

Connections without endpoints are refused before translation, those to other ports of a cluster IP after it.
The chains spread-N and keep-N-S are made when they are first needed and removed when there are many that no
rule uses, in a transaction of their own: kernels before 6.2 refuse to remove a chain in that of its last use.
The number is put into the packet's mark, since nft 1.0 has no other register by which a map can be looked up.
Marks have a meaning on nodes, so it is taken off again there.

In IPv6's map affinity, a hash stands for the address, protocol and port: nft 1.0 can't update an element
whose key has over 16 bytes. Two Services with the same hash, one chance in four billion, would share a
number. An existing element that is updated keeps its number, and lives on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from infranetes_common.addresses import nft_address
from infranetes_common.service_proxy.placement import DROPPED, REFUSED, Placement
from infranetes_common.service_proxy.rules import Key

NAME = "infranetes-services"
FAMILIES = {4: "ip", 6: "ip6"}
MAX_AFFINITIES = 65536
RANGES = "ranges"
CHAINS = frozenset((REFUSED, DROPPED, RANGES, "before", "translate", "after"))  # of a table without rules
CHAIN = re.compile(r"spread-([1-9][0-9]*)|keep-([1-9][0-9]*)-([1-9][0-9]*)")

Change = tuple[Placement | None, Placement | None]
"""A key's old placement and its new one."""


@attrs.frozen
class Tables:
    """The tables of one place.

    :ivar name: of the table of each family. :ivar versions: of IP.
    :ivar bridge: by which packets come in that are translated; "": those that the machine itself sends.
    """

    name: str = NAME
    versions: tuple[int, ...] = (4, 6)
    bridge: str = ""

    def table(self, version: int) -> str:
        """Return the script that creates an empty table, replacing an existing one."""
        ip = FAMILIES[version]
        key = f"ipv{version}_addr . inet_proto . inet_service"
        noted = key if version == 4 else "mark"
        to = _to(ip)
        hook, place, ours = "output", -100, ""
        if self.bridge:
            # Before others that translate, such as kube-proxy.
            hook, place, ours = "prerouting", -101, f'iifname "{self.bridge}" '
            noted = f"ipv{version}_addr . {key}"
        unmarked = f"{ours}ct state new ct status dnat meta mark set 0x0" if self.bridge else ""
        return f"""\
table {ip} {self.name} {{}}
delete table {ip} {self.name}
table {ip} {self.name} {{
  map services {{ type {key} : verdict; }}
  map endpoints {{ type {key} . mark : ipv{version}_addr . inet_service; }}
  map numbers {{ type {key} . mark : mark; }}
  map affinity {{ type {noted} : mark; flags dynamic,timeout; size {MAX_AFFINITIES}; }}
  map refusals {{ type {key} : verdict; }}
  set cluster-ips {{ type ipv{version}_addr; }}
  counter {REFUSED} {{ }}
  counter {DROPPED} {{ }}
  chain {REFUSED} {{ counter name {REFUSED}; meta l4proto tcp reject with tcp reset; reject; }}
  chain {DROPPED} {{ counter name {DROPPED}; drop; }}
  chain {RANGES} {{ }}
  chain before {{ type filter hook {hook} priority {place - 10}; {ours}{to} vmap @refusals; }}
  chain translate {{ type nat hook {hook} priority {place}; {ours}{to} vmap @services; }}
  chain after {{
    type filter hook {hook} priority {place + 10}
    {unmarked}
    {ours}{ip} daddr @cluster-ips goto {REFUSED}
    {ours}jump {RANGES}
  }}
}}
"""

    def removal(self, version: int) -> str:
        """Return the script that removes a table, whether it exists or not."""
        ip = FAMILIES[version]
        return f"table {ip} {self.name} {{}}\ndelete table {ip} {self.name}\n"

    def chains(self, version: int, names: Iterable[str]) -> str:
        """Return the script that creates the chains of `Placement.chain`. No map refers to them yet."""
        ip = FAMILIES[version]
        return "".join(
            f"table {ip} {self.name} {{\n  chain {name} {{\n    {self._chain(ip, name)}\n  }}\n}}\n"
            for name in names
        )

    def without_chains(self, version: int, names: Iterable[str]) -> str:
        """Return the script that removes chains to which no map refers."""
        return "".join(f"delete chain {FAMILIES[version]} {self.name} {name}\n" for name in names)

    def _chain(self, ip: str, name: str) -> str:
        """Return a chain's rules. One ends if a map has no element or is full; then the next one is tried."""
        match = CHAIN.fullmatch(name)
        assert match is not None, name
        count, seconds = match[1] or match[2], match[3]
        to = _to(ip)
        draw = f"numgen random mod {count}"
        go = f"dnat {ip} to {to} . meta mark map @endpoints"
        if not seconds:
            return f"meta mark set {draw}\n{go}"
        choose = f"meta mark set {draw}\nmeta mark set {to} . meta mark map @numbers"
        key = f"{ip} saddr . {to}" if self.bridge else to
        if ip == "ip6":
            key = f"jhash {key} mod {2**32 - 1} seed 1"
        note = f"update @affinity {{ {key} timeout {seconds}s : meta mark }}"
        again = f"meta mark set {key} map @affinity"
        if ip == "ip6":
            again = f"meta mark set {key}\nmeta mark set meta mark map @affinity"
        forget = f"delete @affinity {{ {key} : meta mark }}"  # the endpoint kept for the client is gone
        return "\n".join((choose, note, again, go, forget, choose, note, go))

    def changes(
        self,
        version: int,
        changed: Mapping[Key, Change],
        new_addresses: Iterable[str] = (),
        old_addresses: Iterable[str] = (),
    ) -> str:
        """Return the script that changes the tables' elements for keys. Their chains must exist.

        :param new_addresses: for `cluster-ips`. :param old_addresses: of it.
        """
        removed: dict[str, list[str]] = {}
        added: dict[str, list[str]] = {}
        for key, (before, after) in changed.items():
            was, has = elements(key, before), elements(key, after)
            for (name, element), value in was.items():
                if has.get((name, element)) != value:
                    removed.setdefault(name, []).append(element)
            for (name, element), value in has.items():
                if was.get((name, element)) != value:
                    added.setdefault(name, []).append(f"{element} : {value}")
        removed.setdefault("cluster-ips", []).extend(old_addresses)
        added.setdefault("cluster-ips", []).extend(new_addresses)
        return self._commands("delete", version, removed) + self._commands("add", version, added)

    def ranges(self, version: int, networks: Iterable[str]) -> str:
        """Return the script that drops packets to these ranges, and to no others, where no Service is."""
        ip = FAMILIES[version]
        rules = (
            f"add rule {ip} {self.name} {RANGES} {ip} daddr {nft_address(each)} goto {DROPPED}\n"
            for each in networks
        )
        return f"flush chain {ip} {self.name} {RANGES}\n" + "".join(rules)

    def _commands(self, verb: str, version: int, given: Mapping[str, list[str]]) -> str:
        return "".join(
            f"{verb} element {FAMILIES[version]} {self.name} {name} {{ {', '.join(texts)} }}\n"
            for name, texts in given.items()
            if texts
        )


MACHINE = Tables()


def of_bridge(bridge: str) -> Tables:
    """Return the tables of a node for what comes in by a bridge, which carries IPv4 alone."""
    return Tables(f"{NAME}-{bridge}", (4,), bridge)


def _to(ip: str) -> str:
    return f"{ip} daddr . meta l4proto . th dport"


def elements(key: Key, placement: Placement | None) -> dict[tuple[str, str], str]:
    """Return the elements of one key by their map's name and their own key, as nft writes them."""
    if placement is None:
        return {}
    name = written(key)
    found = {("services" if placement.slots else "refusals", name): f"goto {placement.chain}"}
    for number, (address, port) in placement.numbered.items():
        found["endpoints", f"{name} . {number:#010x}"] = f"{nft_address(address)} . {port}"
    if placement.affinity_seconds:
        for place, number in enumerate(placement.numbered):
            found["numbers", f"{name} . {place:#010x}"] = f"{number:#010x}"
    return found


def written(key: Key) -> str:
    """Return a key as nft writes it."""
    return f"{nft_address(key.address)} . {key.protocol} . {key.port}"
