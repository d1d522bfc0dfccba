# SPDX-License-Identifier: Apache-2.0
"""Gauges of what the node has at the moment: pods, agents, pools, providers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from infranetes.cri.status import versions
from infranetes.machines.agent.container_watch import Reach
from infranetes.machines.context import NodeNames
from infranetes.machines.pool_record import PoolState
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.node.pools import Pools
from infranetes.pods.node.refusals import refusals
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.interface import Share

_CONNECTIONS = Path("/proc/sys/net/netfilter")


@attrs.frozen
class Gauge:
    """One metric. :ivar values: the figures, each by the values of its labels."""

    name: str
    what: str
    labels: Sequence[str]
    values: Mapping[tuple[str, ...], float]


Take = Callable[[], Sequence[Gauge]]


@attrs.frozen
class ShownNode:
    """The parts of the node that are shown."""

    names: NodeNames
    inventory: Inventory
    providers: Providers
    pools: Pools


def node_gauges(node: ShownNode) -> list[Gauge]:
    """Return all of them. A gauge by state shows 0 for a state that nothing is in."""
    node_providers, sandboxes = node.providers, list(node.inventory)
    names = [node_provider.name for node_provider in node_providers]
    pools = [(pool.purpose.handler, pool) for pool in node.pools.all()]
    watched = [(node.providers.of(one.record).name, one.watch) for one in sandboxes if one.watch is not None]
    build = versions()
    return [
        Gauge("infranetes_build_info", "This release, and what runs it.", list(build),
              {tuple(build.values()): 1}),
        Gauge("infranetes_ready", "1: pods can be run; 0: no provider can be asked for VMs.", (),
              {(): not node.providers.trouble}),
        Gauge("infranetes_provider_ready", "1: the provider can be asked for VMs.", ("provider",),
              {(node_provider.name,): not node_provider.trouble for node_provider in node_providers}),
        Gauge("infranetes_orphans", "VMs that no record knew in the last pass.", ("provider",),
              {(node_provider.name,): len(node_provider.orphans) for node_provider in node_providers}),
        Gauge("infranetes_sandboxes", "Pods' sandboxes.", ("provider", "state"),
              _counted(((node.providers.of(one.record).name, one.state.value) for one in sandboxes),
                       [(name, state.value) for name in names for state in SandboxState])),
        Gauge("infranetes_starts", "Starts of pods whose number at once is bounded.", ("provider", "state"),
              {(node_provider.name, state): number for node_provider in node_providers for state, number in
               (("waiting", node_provider.starts.waiting), ("under_way", node_provider.starts.under_way))}),
        Gauge("infranetes_containers", "Pods' containers.", ("state",),
              _counted(((one.state.value,) for one in node.inventory.containers.values()),
                       [(state.value,) for state in ContainerState])),
        Gauge("infranetes_agents", "Agents of pods' VMs, by whether they can be reached.",
              ("provider", "reach"),
              _counted(((name, watch.reach.value) for name, watch in watched),
                       [(name, reach.value) for name in names for reach in Reach])),
        Gauge("infranetes_pool_vms", "VMs of the pool.", ("handler", "state"),
              _counted(((name, one.state.value) for name, pool in pools for one in pool.members.values()),
                       [(name, state.value) for name, _ in pools for state in PoolState])),
        Gauge("infranetes_pool_wanted_vms", "VMs that the pool is to have.", ("handler",),
              {(name,): pool.target for name, pool in pools}),
        Gauge("infranetes_pool_failing", "1: the pool's last launch failed.", ("handler",),
              {(name,): bool(pool.trouble) for name, pool in pools}),
        Gauge("infranetes_refused_pods", "Pods that lately sent packets beyond a share of theirs.",
              ("provider", "share"),
              _counted(((node.providers.of(one.record).name, share.value) for one in sandboxes
                        for share, refused in refusals(node.providers, one).items() if refused.lately),
                       [(name, share.value) for name in names for share in Share])),
        *_connections(),
    ]  # fmt: skip


def _connections() -> list[Gauge]:
    """Return the gauges of the connection table of the node's kernel; 0, 0: it follows none."""
    name = "infranetes_node_connections"
    count, most = map(_number, ("nf_conntrack_count", "nf_conntrack_max"))
    return [
        Gauge(name, "Connections that the node's kernel follows.", (), {(): count}),
        Gauge(f"{name}_max", "As many as it can follow.", (), {(): most}),
    ]


def _number(name: str) -> int:
    try:
        return int((_CONNECTIONS / name).read_text())
    except OSError:
        return 0


def _counted(
    found: Iterable[tuple[str, ...]], known: Iterable[tuple[str, ...]]
) -> Mapping[tuple[str, ...], float]:
    return {**dict.fromkeys(known, 0), **Counter(found)}
