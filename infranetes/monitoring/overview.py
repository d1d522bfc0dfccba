# SPDX-License-Identifier: Apache-2.0
"""What the page shows, as values. They are taken in the reactor's thread; the page is made in another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from infranetes.cri.status import runtime_version
from infranetes.machines.pool import Pool
from infranetes.monitoring.gauges import ShownNode
from infranetes.monitoring.recent_warnings import Warned
from infranetes.observer import Launch
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.guest_view import has_screen, way_of

MAX_PODS = 500  # the newest; older ones are counted, not shown


@attrs.frozen
class Provider:
    """A provider. :ivar trouble: why it can't be asked for VMs; "": it can."""

    name: str
    trouble: str
    pods: int
    orphans: int


@attrs.frozen
class Pod:
    """A pod and its VM. :ivar message: what is wrong, for people; "": nothing, as far as is known."""

    id: str
    name: str
    state: str
    created_at: float  # seconds since 1970 UTC
    running: int
    containers: int
    provider: str
    vm: str
    size: str
    address: str
    reach: str
    message: str
    way: str = ""  # by which its guest without our agent is reached; "": it has our agent
    screen: bool = False  # whether there is a page with its screen
    namespace: str = ""
    cost: float | None = None  # US dollars an hour; None: not known


@attrs.frozen
class PoolOverview:
    """A pool. :ivar handler: the handler whose pods may have its VMs; "": those of all other handlers."""

    handler: str
    target: int
    states: tuple[tuple[str, int], ...]
    drained: bool
    trouble: str


@attrs.frozen
class Overview:
    """All that the page shows. :ivar trouble: why no pod can be run; "": pods can be run."""

    now: float
    cluster: str
    node: str
    version: str
    trouble: str
    providers: Sequence[Provider]
    pods: Sequence[Pod]
    more_pods: int  # how many are not shown
    launches: Sequence[Launch]  # the newest first
    pools: Sequence[PoolOverview]
    warnings: Sequence[Warned]  # the newest first
    states: Sequence[tuple[str, int]] = ()  # how many pods are in each state, most first
    cost: float | None = None  # of all VMs whose price is known, US dollars an hour; None: of none


def overview(
    node: ShownNode,
    now: float,
    launches: Iterable[Launch],
    warnings: Iterable[Warned],
    *,
    screens: bool = False,
) -> Overview:
    """Return the overview of the node as it is now.

    :param now: seconds since 1970 UTC. :param screens: whether pages show the screens of VMs."""
    sandboxes = sorted(node.inventory, key=lambda one: one.record.created_at, reverse=True)
    count = Counter(node.providers.of(one.record).name for one in sandboxes)
    states = Counter(one.state.value for one in sandboxes)
    costs = [cost for one in sandboxes if (cost := _cost(one)) is not None]
    node_providers = node.providers
    return Overview(
        now=now,
        cluster=node.names.cluster,
        node=node.names.node,
        version=runtime_version(),
        trouble=node.providers.trouble,
        providers=[
            Provider(
                node_provider.name,
                node_provider.trouble,
                count[node_provider.name],
                len(node_provider.orphans),
            )
            for node_provider in node_providers
        ],
        pods=[_pod(node, one, screens) for one in sandboxes[:MAX_PODS]],
        more_pods=max(len(sandboxes) - MAX_PODS, 0),
        launches=list(launches)[::-1],
        pools=[_pool(pool) for pool in node.pools.all() if pool.target or pool.members or pool.drained],
        warnings=list(warnings)[::-1],
        states=tuple(states.most_common()),
        cost=sum(costs) if costs else None,
    )


def _pod(node: ShownNode, sandbox: Sandbox, screens: bool) -> Pod:
    record, instance, watch = sandbox.record, sandbox.instance, sandbox.watch
    states = [one.state for one in sandbox.containers.values()]
    return Pod(
        id=sandbox.id,
        name=sandbox.pod,
        state=sandbox.state.value,
        created_at=record.created_at / 1e9,
        running=states.count(ContainerState.RUNNING),
        containers=len(states),
        provider=node.providers.of(record).name,
        vm=record.instance_id,
        size=instance.size if instance is not None else "",
        address=record.address,
        reach=watch.reach.value if watch is not None else "",
        way=way_of(sandbox),
        screen=screens and has_screen(node.providers, sandbox),
        message=sandbox.trouble,
        namespace=sandbox.config.metadata.namespace,
        cost=_cost(sandbox),
    )


def _cost(sandbox: Sandbox) -> float | None:
    """Return what the VM costs, as its provider last said."""
    return sandbox.instance.cost_per_hour if sandbox.instance is not None else None


def _pool(pool: Pool) -> PoolOverview:
    states = Counter(member.state.value for member in pool.members.values())
    return PoolOverview(
        pool.purpose.handler, pool.target, tuple(sorted(states.items())), pool.drained, pool.trouble
    )
