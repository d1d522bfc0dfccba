# SPDX-License-Identifier: Apache-2.0
"""The resource usage of containers and pods: stats for kubelet and crictl, metrics for Prometheus."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.cri import validate
from infranetes.cri.paging import pages_of
from infranetes.cri.sandboxes import found_or_none
from infranetes.cri.translate import framed
from infranetes.pods.containers.containers import Containers
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.node.refusals import refusals
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.listing import Listing
from infranetes.stats import metrics
from infranetes.stats.gather import Figures, Gatherer
from infranetes.stats.translate import container_stats, sandbox_stats
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.wire import cri, vmserver
from infranetes_common.wire.cri_rpcs import RuntimeStatsRpcs
from txgrpc import Call
from txgrpc.turns import Turns

TURN_SECONDS = 0.01  # how long lists may work in one turn of the reactor
# The most bytes of one sandbox's item in a list, and what each of its containers adds to that limit. kubelet
# accepts 16 MiB for all items together.
MAX_ITEM, MAX_ITEM_PER_CONTAINER = 256 * 1024, 64 * 1024

Selectable = TypeVar("Selectable", Sandbox, Container)
_log = Logger()


class StatsCalls(RuntimeStatsRpcs):
    """The calls for stats and metrics, which the agents measure.

    A list leaves out the pods whose agents do not answer in time, and never fails or waits for them. Lists of
    stats have no old figures either: crictl and kubelet compute rates between two answers."""

    def __init__(
        self,
        clock: IReactorTime,
        listing: Listing,
        providers: Providers,
        sandboxes: Sandboxes,
        containers: Containers,
    ) -> None:
        self._turns = Turns(clock, TURN_SECONDS)  # all lists that are being made share them
        self._listing = listing
        self._providers = providers
        self._sandboxes = sandboxes
        self._containers = containers
        self._gatherer = Gatherer(clock, listing)
        self._left_out: set[str] = set()  # sandboxes whose figures were left out and logged

    def _item(self, sandbox: Sandbox, make: Callable[[], Message]) -> bytes:
        """Return a framed item of a list. If making it fails, or it is too large, log that and return b""."""
        error = ""
        try:
            item = framed(make())
            if len(item) > MAX_ITEM + MAX_ITEM_PER_CONTAINER * len(sandbox.containers):
                error = f"they would be {len(item)} bytes"
        except Exception as failed:
            error = repr(failed)
        if not error:
            return item
        if sandbox.id not in self._left_out:
            self._left_out &= self._listing.inventory.sandboxes.keys()
            self._left_out.add(sandbox.id)
            _log.error("figures of sandbox {sandbox} are left out: {error}", sandbox=sandbox.id, error=error)
        return b""

    async def _rest(self) -> None:
        """End this turn of the reactor if lists have taken long enough."""
        resting = self._turns.rest()
        if resting is not None:
            await resting

    # ---- containers

    async def ContainerStats(
        self, request: cri.ContainerStatsRequest, call: Call
    ) -> cri.ContainerStatsResponse:
        container = self._containers.lookup(request.container_id)
        figures = (await self._gatherer.now([container.sandbox])).get(container.sandbox.id)
        used = figures.by_container().get(container.id) if figures is not None else None
        if container.state is ContainerState.RUNNING and used is None:
            raise self._no_figures(container.sandbox, f"container {container.id}")
        return cri.ContainerStatsResponse(stats=container_stats(container, used))

    async def ListContainerStats(self, request: cri.ListContainerStatsRequest, call: Call) -> bytes:
        return b"".join([item async for item in self._of_containers(request.filter)])

    async def StreamContainerStats(
        self, request: cri.StreamContainerStatsRequest, call: Call
    ) -> AsyncIterator[bytes]:
        async with aclosing(pages_of(self._of_containers(request.filter))) as listed:
            async for page in listed:
                yield page

    async def _of_containers(self, filter: cri.ContainerStatsFilter) -> AsyncGenerator[bytes, None]:
        by_sandbox: dict[str, list[Container]] = {}
        for container in self._selected(filter):
            by_sandbox.setdefault(container.sandbox.id, []).append(container)
        figures = await self._gatherer.now([containers[0].sandbox for containers in by_sandbox.values()])
        for id, containers in by_sandbox.items():
            for container, used in _shown(containers, figures.get(id)):
                if item := self._item(container.sandbox, partial(container_stats, container, used)):
                    yield item
            await self._rest()

    def _selected(self, filter: cri.ContainerStatsFilter) -> list[Container]:
        containers = self._listing.containers()
        inventory = self._listing.inventory
        if filter.id:
            only = found_or_none(inventory.container, filter.id)
            containers = [container for container in containers if container is only]
        if filter.pod_sandbox_id:
            sandbox = found_or_none(inventory.sandbox, filter.pod_sandbox_id)
            containers = [container for container in containers if container.sandbox is sandbox]
        return _with_labels(containers, dict(filter.label_selector))

    # ---- pods

    async def PodSandboxStats(
        self, request: cri.PodSandboxStatsRequest, call: Call
    ) -> cri.PodSandboxStatsResponse:
        sandbox = self._sandboxes.lookup(request.pod_sandbox_id)
        if sandbox.state is not SandboxState.READY:
            raise FailedPrecondition(f"sandbox {sandbox.id} is {sandbox.state.value}: it uses nothing")
        figures = (await self._gatherer.now([sandbox])).get(sandbox.id)
        if figures is None:
            raise self._no_figures(sandbox, f"sandbox {sandbox.id}")
        return cri.PodSandboxStatsResponse(stats=_of_sandbox(sandbox, figures))

    async def ListPodSandboxStats(self, request: cri.ListPodSandboxStatsRequest, call: Call) -> bytes:
        return b"".join([item async for item in self._of_sandboxes(request.filter)])

    async def StreamPodSandboxStats(
        self, request: cri.StreamPodSandboxStatsRequest, call: Call
    ) -> AsyncIterator[bytes]:
        async with aclosing(pages_of(self._of_sandboxes(request.filter))) as listed:
            async for page in listed:
                yield page

    async def _of_sandboxes(self, filter: cri.PodSandboxStatsFilter) -> AsyncGenerator[bytes, None]:
        sandboxes = self._listing.sandboxes()
        if filter.id:
            only = found_or_none(self._listing.inventory.sandbox, filter.id)
            sandboxes = [sandbox for sandbox in sandboxes if sandbox is only]
        sandboxes = _with_labels(sandboxes, dict(filter.label_selector))
        figures = await self._gatherer.now(sandboxes)
        for sandbox in sandboxes:
            if (
                sandbox.id in figures
                and sandbox.state is SandboxState.READY
                and (item := self._item(sandbox, partial(_of_sandbox, sandbox, figures[sandbox.id])))
            ):
                yield item
            await self._rest()

    # ---- metrics

    async def ListMetricDescriptors(
        self, request: cri.ListMetricDescriptorsRequest, call: Call
    ) -> cri.ListMetricDescriptorsResponse:
        return cri.ListMetricDescriptorsResponse(descriptors=metrics.descriptors())

    async def ListPodSandboxMetrics(self, request: cri.ListPodSandboxMetricsRequest, call: Call) -> bytes:
        return b"".join([item async for item in self._metrics()])

    async def StreamPodSandboxMetrics(
        self, request: cri.StreamPodSandboxMetricsRequest, call: Call
    ) -> AsyncIterator[bytes]:
        async with aclosing(pages_of(self._metrics())) as listed:
            async for page in listed:
                yield page

    async def _metrics(self) -> AsyncGenerator[bytes, None]:
        """Yield the metrics, including the last known ones of VMs that did not answer: each has its time."""
        sandboxes = self._listing.sandboxes()
        await self._gatherer.now(sandboxes)
        for sandbox in sandboxes:
            figures = self._gatherer.last(sandbox.id)
            if (
                figures is not None
                and sandbox.state is SandboxState.READY
                and (item := self._item(sandbox, partial(_metrics, self._providers, sandbox, figures.stats)))
            ):
                yield item
            await self._rest()

    def _no_figures(self, sandbox: Sandbox, what: str) -> Unavailable:
        trouble = sandbox.watch.trouble if sandbox.watch is not None else ""
        return Unavailable(
            f"{what} has no figures now: the agent of its VM did not give any in time"
            f"{f' ({trouble})' if trouble else ''}; try again, or see whether the VM is well"
        )


def _shown(
    containers: list[Container], figures: Figures | None
) -> list[tuple[Container, vmserver.ContainerUsage | None]]:
    """Return containers of one sandbox, each with its figures. Running ones without figures are left out."""
    used = figures.by_container() if figures is not None else {}
    return [
        (container, used.get(container.id))
        for container in containers
        if container.id in used or container.state is not ContainerState.RUNNING
    ]


def _of_sandbox(sandbox: Sandbox, figures: Figures) -> cri.PodSandboxStats:
    shown = [container for container in sandbox.containers.values() if container.shown]
    return sandbox_stats(
        sandbox, figures.stats, (container_stats(*usage) for usage in _shown(shown, figures))
    )


def _with_labels(entries: list[Selectable], selector: dict[str, str]) -> list[Selectable]:
    if not selector:
        return entries
    return [entry for entry in entries if validate.labels_match(entry.config.labels, selector)]


def _metrics(providers: Providers, sandbox: Sandbox, answer: vmserver.StatsResponse) -> cri.PodSandboxMetrics:
    rules = sandbox.machine.rules
    progress = None if rules is None else rules.progress()
    return metrics.sandbox_metrics(sandbox, answer, progress, refusals(providers, sandbox))
