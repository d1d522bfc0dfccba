"""What containers and pods use: figures for kubelet and crictl, metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from infranetes.cri import validate
from infranetes.cri.pieces import pieces_of
from infranetes.cri.sandboxes import resolved
from infranetes.cri.translate import framed
from infranetes.pods import listing
from infranetes.pods.containers import Containers
from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.node import Node
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.states import ContainerState, SandboxState
from infranetes.pods.waits import sleep
from infranetes.stats import metrics
from infranetes.stats.gather import Figures, Gatherer
from infranetes.stats.translate import container_stats, sandbox_stats
from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, Unavailable

TURN_SECONDS = 0.01  # of work; then the reactor is left to others


class _Turns:
    """Of one list's work."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._began = time.perf_counter()

    async def rest(self) -> None:
        """Leave the reactor to others if this turn has taken long enough."""
        if time.perf_counter() - self._began > TURN_SECONDS:
            await sleep(self._clock, 0)
            self._began = time.perf_counter()


class StatsCalls:
    """A list leaves out what did not answer in time, and never fails or waits for it: crictl and kubelet
    compute rates between two answers, so that old figures would be worse than none."""

    def __init__(self, node: Node, sandboxes: Sandboxes, containers: Containers) -> None:
        self._stats_node = node
        self._stats_sandboxes = sandboxes
        self._stats_containers = containers
        self._gatherer = Gatherer(node)

    # ---- containers

    async def ContainerStats(
        self, request: cri.ContainerStatsRequest, call: Any
    ) -> cri.ContainerStatsResponse:
        container = self._stats_containers.known(request.container_id)
        figures = (await self._gatherer.now([container.sandbox])).get(container.sandbox.id)
        used = figures.by_container().get(container.id) if figures is not None else None
        if container.state is ContainerState.RUNNING and used is None:
            raise self._no_figures(container.sandbox, f"container {container.id}")
        return cri.ContainerStatsResponse(stats=container_stats(container, used))

    async def ListContainerStats(self, request: cri.ListContainerStatsRequest, call: Any) -> bytes:
        return b"".join([item async for item in self._of_containers(request.filter)])

    async def StreamContainerStats(
        self, request: cri.StreamContainerStatsRequest, call: Any
    ) -> AsyncIterator[bytes]:
        async with aclosing(pieces_of(self._of_containers(request.filter))) as found:
            async for piece in found:
                yield piece

    async def _of_containers(self, wanted: cri.ContainerStatsFilter) -> AsyncGenerator[bytes, None]:
        by_sandbox: dict[str, list[Container]] = {}
        for one in self._with_stats(wanted):
            by_sandbox.setdefault(one.sandbox.id, []).append(one)
        figures = await self._gatherer.now([containers[0].sandbox for containers in by_sandbox.values()])
        turns = _Turns(self._stats_node.clock)
        for id, containers in by_sandbox.items():
            for stats in _shown(containers, figures.get(id)):
                yield framed(stats)
            await turns.rest()

    def _with_stats(self, wanted: cri.ContainerStatsFilter) -> list[Container]:
        found = listing.containers(self._stats_node)
        inventory = self._stats_node.inventory
        if wanted.id:
            only = resolved(inventory.container, wanted.id)
            found = [one for one in found if one is only]
        if wanted.pod_sandbox_id:
            sandbox = resolved(inventory.sandbox, wanted.pod_sandbox_id)
            found = [one for one in found if one.sandbox is sandbox]
        return _with_labels(found, dict(wanted.label_selector))

    # ---- pods

    async def PodSandboxStats(
        self, request: cri.PodSandboxStatsRequest, call: Any
    ) -> cri.PodSandboxStatsResponse:
        sandbox = self._stats_sandboxes.known(request.pod_sandbox_id)
        if sandbox.state is not SandboxState.READY:
            raise FailedPrecondition(f"sandbox {sandbox.id} is {sandbox.state.value}: it uses nothing")
        figures = (await self._gatherer.now([sandbox])).get(sandbox.id)
        if figures is None:
            raise self._no_figures(sandbox, f"sandbox {sandbox.id}")
        return cri.PodSandboxStatsResponse(stats=_of_sandbox(sandbox, figures))

    async def ListPodSandboxStats(self, request: cri.ListPodSandboxStatsRequest, call: Any) -> bytes:
        return b"".join([item async for item in self._of_sandboxes(request.filter)])

    async def StreamPodSandboxStats(
        self, request: cri.StreamPodSandboxStatsRequest, call: Any
    ) -> AsyncIterator[bytes]:
        async with aclosing(pieces_of(self._of_sandboxes(request.filter))) as found:
            async for piece in found:
                yield piece

    async def _of_sandboxes(self, wanted: cri.PodSandboxStatsFilter) -> AsyncGenerator[bytes, None]:
        found = listing.sandboxes(self._stats_node)
        if wanted.id:
            only = resolved(self._stats_node.inventory.sandbox, wanted.id)
            found = [one for one in found if one is only]
        found = _with_labels(found, dict(wanted.label_selector))
        figures = await self._gatherer.now(found)
        turns = _Turns(self._stats_node.clock)
        for sandbox in found:
            if sandbox.id in figures and sandbox.state is SandboxState.READY:
                yield framed(_of_sandbox(sandbox, figures[sandbox.id]))
            await turns.rest()

    # ---- metrics

    async def ListMetricDescriptors(
        self, request: cri.ListMetricDescriptorsRequest, call: Any
    ) -> cri.ListMetricDescriptorsResponse:
        return cri.ListMetricDescriptorsResponse(descriptors=metrics.descriptors())

    async def ListPodSandboxMetrics(self, request: cri.ListPodSandboxMetricsRequest, call: Any) -> bytes:
        return b"".join([item async for item in self._metrics()])

    async def StreamPodSandboxMetrics(
        self, request: cri.StreamPodSandboxMetricsRequest, call: Any
    ) -> AsyncIterator[bytes]:
        async with aclosing(pieces_of(self._metrics())) as found:
            async for piece in found:
                yield piece

    async def _metrics(self) -> AsyncGenerator[bytes, None]:
        """Also the last ones of VMs that did not answer: metrics say when they were measured."""
        found = listing.sandboxes(self._stats_node)
        await self._gatherer.now(found)
        turns = _Turns(self._stats_node.clock)
        for sandbox in found:
            figures = self._gatherer.last(sandbox.id)
            if figures is not None and sandbox.state is SandboxState.READY:
                yield framed(metrics.sandbox_metrics(sandbox, figures.stats))
            await turns.rest()

    def _no_figures(self, sandbox: Sandbox, what: str) -> Unavailable:
        trouble = sandbox.view.trouble if sandbox.view is not None else ""
        return Unavailable(
            f"{what} has no figures now: the agent of its VM did not give any in time"
            f"{f' ({trouble})' if trouble else ''}; try again, or see whether the VM is well"
        )


def _shown(containers: list[Container], figures: Figures | None) -> list[cri.ContainerStats]:
    """Those of one sandbox. What runs and did not answer is left out."""
    used = figures.by_container() if figures is not None else {}
    return [
        container_stats(one, used.get(one.id))
        for one in containers
        if one.id in used or one.state is not ContainerState.RUNNING
    ]


def _of_sandbox(sandbox: Sandbox, figures: Figures) -> cri.PodSandboxStats:
    shown = [one for one in sandbox.containers.values() if one.shown]
    return sandbox_stats(sandbox, figures.stats, _shown(shown, figures))


def _with_labels(found: list[Any], selector: dict[str, str]) -> list[Any]:
    if not selector:
        return found
    return [one for one in found if validate.labels_match(one.config.labels, selector)]
