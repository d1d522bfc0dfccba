# SPDX-License-Identifier: Apache-2.0
"""The firewalls of a bridge's VMs: what the bridge needs, so that all that they send is routed and judged.

Two tables of nftables judge what comes from and goes to its VMs, beside those in `bridge`: `ip` is that of
`infranetes.firewalls.pods`, and this is `bridge`:

    hook        what it does
    prerouting  hands all that VMs send to one address to the node, which routes it: also what is for another
                VM of the bridge, so that one place judges everything
    forward     lets packets to groups and to everybody through from VMs that may connect to everyone to VMs
                that everyone may connect to

To its address a VM is held by the table of `bridge`.
"""

from __future__ import annotations

from infranetes.firewalls import pods
from infranetes.firewalls.pods import NAMES
from infranetes.providers.qemu.network.bridge import MAC, BridgePort, port_group
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.pod_firewall_rules import Way
from infranetes_common.reactors import IReactor

# Matches for frames. A frame to one port that the bridge forwards is on its way to an endpoint of a Service:
# if br_netfilter has translated it, it also has it judged like a routed packet.
_TO_ONE = "ether daddr & 01:00:00:00:00:00 == 00:00:00:00:00:00"
_TO_MANY = "ether daddr & 01:00:00:00:00:00 != 00:00:00:00:00:00"


class BridgeFirewalls(pods.FirewallTables[BridgePort]):
    """The tables of one bridge. :param bridge: its name."""

    def __init__(self, reactor: IReactor, bridge: str) -> None:
        super().__init__(reactor, f"infranetes_{bridge}_firewalls", bridge, _BridgeRules(bridge))


class _BridgeRules:
    """The table `bridge`."""

    family = "bridge"
    needs = "nftables for bridges (CONFIG_NF_TABLES_BRIDGE)"

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge

    def table(self) -> str:
        ours = f"iifgroup {port_group(self._bridge)} ether type ip"
        return f"""
            set open-egress {{ type ifname; }}
            set open-ingress {{ type ifname; }}
            chain route {{
                type filter hook prerouting priority -100; policy accept;
                {ours} {_TO_ONE} ether daddr set {MAC} meta pkttype set host
            }}
            chain groups {{
                type filter hook forward priority -100; policy accept;
                {ours} {_TO_MANY} iifname != @open-egress drop
                {ours} {_TO_MANY} oifname != @open-ingress drop
            }}
            """

    def elements(self, table: str, pod: BridgePort, firewall: PodFirewall | None) -> list[str]:
        lines = []
        for way in Way:
            is_open = firewall is not None and way.of(firewall) is None
            for verb in ["add"] if is_open else ["add", "delete"]:
                lines.append(f'{verb} element bridge {table} open-{NAMES[way]} {{ "{pod.tap}" }}')
        return lines

    def unjudged(self) -> str:
        # Broadcasts and multicasts are not routed, but br_netfilter passes those of bridges through these
        # rules.
        return f'iifname "{self._bridge}" meta pkttype {{ broadcast, multicast }} accept'
