# SPDX-License-Identifier: Apache-2.0
"""Makes the provider's parts that connect its VMs, place their processes and keep their consoles."""

from __future__ import annotations

import attrs

from infranetes.providers.interface import ProviderContext
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.dhcp.servers import Servers
from infranetes.providers.qemu.launch.uplink import BridgeUplink, NamespaceUplink, UplinkOfRecord
from infranetes.providers.qemu.network.bridge import Bridge
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes.providers.qemu.network.pod_network import PodNetwork
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.vm.consoles import ConsoleArchive
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes_common.reactors import IReactor


@attrs.frozen
class Parts:
    """The parts that connect VMs to the network, place them in control groups and keep their consoles."""

    pod_network: PodNetwork  # the bridge's
    uplink: UplinkOfRecord
    placement: Placement
    consoles: ConsoleArchive


def make_parts(
    reactor: IReactor, settings: QemuSettings, context: ProviderContext, paths: ProviderPaths
) -> Parts:
    """Make the parts; nothing of the node is changed yet."""
    bridge = Bridge(
        reactor,
        settings.bridge,
        settings.mtu,
        cluster=context.cluster_networks,
        share=settings.connections,
    )
    firewalls = BridgeFirewalls(reactor, settings.bridge) if context.network_policies else None
    network = PodNetwork(reactor, bridge, settings.pod_cidr, paths.network, firewalls)
    namespaces = Namespaces(reactor)
    uplink = UplinkOfRecord(
        BridgeUplink(network),
        NamespaceUplink(namespaces, context.joins_namespaces),
        Servers(reactor, namespaces),
    )
    consoles = ConsoleArchive(paths.consoles, settings.kept_consoles, settings.console_size)
    return Parts(network, uplink, Placement(reactor), consoles)
