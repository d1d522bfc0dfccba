# SPDX-License-Identifier: Apache-2.0
"""The size of a pod's VM, as requested and as recorded. docs/resources.md has the rule as a table."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from infranetes.kubernetes.pod_needs import PodNeeds
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.inventory import Sandbox
from infranetes.providers.annotations import requests
from infranetes.providers.interface import Size
from infranetes_common.huge_pages import bytes_of
from infranetes_common.quantities import Needs
from infranetes_common.wire import cri

CPU_PERIOD = 100_000  # microseconds, the kernel's default
SHARES_PER_CORE = 1024
UNLIMITED = 1 << 60  # bytes
SOURCE = "kubernetes.io/config.source"  # the annotation in which kubelet names the source of a pod
API_SERVER = "api"


def size_of(config: cri.PodSandboxConfig) -> Size:
    """Return the size that the pod asks for through the CRI, with its RuntimeClass's overhead."""
    return size_of_resources(config.linux.resources, config.linux.overhead)


def size_of_resources(resources: cri.LinuxContainerResources, overhead: cri.LinuxContainerResources) -> Size:
    """Return the size that these resources ask for.

    The overhead's CPU is not counted: it is spent outside the VM."""
    limit = _memory(resources)
    return Size(
        cpu_millis=_cpu_millis(resources),
        memory_bytes=limit,
        memory_limited=bool(limit),
        overhead_bytes=max(overhead.memory_limit_in_bytes, 0),
        huge_bytes=bytes_of(resources),
    )


def limits_in(resources: cri.LinuxContainerResources) -> Size:
    """Return the limits among these resources; 0: none."""
    return Size(_cpu_limit(resources), _memory(resources))


def recorded_size(sandbox: Sandbox) -> Size:
    """Return the size that the VM was launched with or last resized to, without its handler's defaults."""
    record, by_resources = sandbox.record, size_of(sandbox.config)
    return attrs.evolve(
        by_resources,
        cpu_millis=record.cpu_millis or by_resources.cpu_millis,
        memory_bytes=record.memory_bytes or by_resources.memory_bytes,
    )


@attrs.frozen(eq=False, repr=False)
class RequestedSizes:
    """The sizes that pods ask for, by the CRI, annotations and the API server.

    :param pod_needs: knows what pods request beyond what the CRI carries; None: nothing does."""

    _handlers: Handlers
    _pod_needs: PodNeeds | None

    async def of(
        self, sandbox: Sandbox, resources: cri.LinuxContainerResources, overhead: cri.LinuxContainerResources
    ) -> tuple[Size, bool]:
        """Return the size that the pod asks for, and whether that includes its containers' requests: they may
        be unknown.

        :param resources: the sum of its containers' resources, as kubelet gives it.
        :raise InvalidArgument: an annotation is malformed; the message names it."""
        annotations = self._handlers.of(sandbox.record).vm_annotations(sandbox.config.annotations)
        by_resources, by_annotation = size_of_resources(resources, overhead), requests(annotations)
        if by_annotation.cpu_millis and by_annotation.memory_bytes:
            return _at_least(by_resources, by_annotation), True
        needs = await self._needs(sandbox, annotations)
        if needs is None:
            return _at_least(by_resources, by_annotation), False
        merged = Needs(
            cpu_millis=by_annotation.cpu_millis or needs.cpu_millis,
            memory_bytes=by_annotation.memory_bytes or needs.memory_bytes,
        )
        return _at_least(by_resources, merged), True

    async def _needs(self, sandbox: Sandbox, annotations: Mapping[str, str]) -> Needs | None:
        """Return what the pod requests according to the API server, or None if that is not known.
        The API server does not know pods of other sources, such as static ones: for these it is empty."""
        if self._pod_needs is None or annotations.get(SOURCE) != API_SERVER:
            return Needs()
        metadata = sandbox.config.metadata
        return await self._pod_needs.of(metadata.namespace, metadata.name, metadata.uid)


def _at_least(size: Size, needs: Needs) -> Size:
    return attrs.evolve(
        size,
        cpu_millis=max(size.cpu_millis, needs.cpu_millis),
        memory_bytes=max(size.memory_bytes, needs.memory_bytes),
    )


def _memory(resources: cri.LinuxContainerResources) -> int:
    """Return the limit in bytes, or 0 for none. Version 1 of cgroups expresses "none" as a huge number."""
    limit = resources.memory_limit_in_bytes
    return int(limit) if 0 < limit < UNLIMITED else 0


def _cpu_limit(resources: cri.LinuxContainerResources) -> int:
    return int(max(resources.cpu_quota, 0) * 1000 // (resources.cpu_period or CPU_PERIOD))


def _cpu_millis(resources: cri.LinuxContainerResources) -> int:
    """Return the larger of limit and request: the limit may cover only some of the containers."""
    limit, request = _cpu_limit(resources), 0
    if resources.cpu_shares > 2:  # kubelet gives 2 shares to a pod that requests nothing
        request = int(resources.cpu_shares * 1000 // SHARES_PER_CORE)
    return max(limit, request)
