# SPDX-License-Identifier: Apache-2.0
"""The CRI's calls for containers, including ExecSync."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from infranetes.cri import translate, validate
from infranetes.cri.paging import pages
from infranetes.cri.sandboxes import before_deadline, found_or_none
from infranetes.pods.containers.containers import Containers
from infranetes.pods.node.inventory import Container
from infranetes.pods.vm.listing import Listing, shown_state
from infranetes_common import cpusets
from infranetes_common.concurrency import shielded
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeContainerRpcs, RuntimeExecRpcs
from txgrpc import Call


class ContainerCalls(RuntimeContainerRpcs):
    """The calls that change, show and list containers. `pods.Containers` decides; this class translates."""

    def __init__(self, listing: Listing, containers: Containers) -> None:
        self._listing = listing
        self._containers = containers

    async def CreateContainer(
        self, request: cri.CreateContainerRequest, call: Call
    ) -> cri.CreateContainerResponse:
        if not request.pod_sandbox_id:
            raise InvalidArgument("pod_sandbox_id is empty")
        if not request.HasField("config"):
            raise InvalidArgument("config is missing")
        validate.container_config(request.config)
        limit = before_deadline(call)
        id = await self._containers.create(request.pod_sandbox_id, request.config, limit)
        return cri.CreateContainerResponse(container_id=id)

    async def StartContainer(
        self, request: cri.StartContainerRequest, call: Call
    ) -> cri.StartContainerResponse:
        await self._containers.start(request.container_id)
        return cri.StartContainerResponse()

    async def StopContainer(self, request: cri.StopContainerRequest, call: Call) -> cri.StopContainerResponse:
        grace = validate.seconds(max(request.timeout, 0), "timeout")  # other runtimes kill it, too
        await self._containers.stop(request.container_id, grace, before_deadline(call))
        return cri.StopContainerResponse()

    async def RemoveContainer(
        self, request: cri.RemoveContainerRequest, call: Call
    ) -> cri.RemoveContainerResponse:
        await shielded(self._containers.remove(request.container_id))
        return cri.RemoveContainerResponse()

    async def ListContainers(self, request: cri.ListContainersRequest, call: Call) -> bytes:
        return b"".join(translate.container_items(await self._selected(request.filter)))

    async def StreamContainers(
        self, request: cri.StreamContainersRequest, call: Call
    ) -> AsyncIterator[bytes]:
        for page in pages(translate.container_items(await self._selected(request.filter))):
            yield page

    async def _selected(self, filter: cri.ContainerFilter) -> list[Container]:
        await self._listing.refresh(self._listing.inventory)
        containers = self._listing.containers()
        if filter.id:
            only = found_or_none(self._listing.inventory.container, filter.id)
            containers = [container for container in containers if container is only]
        if filter.pod_sandbox_id:
            sandbox = found_or_none(self._listing.inventory.sandbox, filter.pod_sandbox_id)
            containers = [container for container in containers if container.sandbox is sandbox]
        if filter.HasField("state"):
            containers = [
                container for container in containers if shown_state(container) == filter.state.state
            ]
        if filter.label_selector:
            selector = dict(filter.label_selector)
            containers = [
                container
                for container in containers
                if validate.labels_match(container.config.labels, selector)
            ]
        return containers

    async def ContainerStatus(
        self, request: cri.ContainerStatusRequest, call: Call
    ) -> cri.ContainerStatusResponse:
        container = self._containers.lookup(request.container_id)
        await self._listing.refresh([container.sandbox])
        response = cri.ContainerStatusResponse(status=translate.container_status(container))
        if request.verbose:
            seen = container.reported
            info = {
                "sandboxID": container.record.sandbox_id,
                "state": container.state.value,
                "pid": seen.pid if seen is not None else 0,
                "imageID": container.record.image_id,
                "vm": container.sandbox.record.instance_id,
                "logComplete": container.log_position is not None and container.log_position.done,
            }
            response.info["info"] = json.dumps(info)
        return response

    async def UpdateContainerResources(
        self, request: cri.UpdateContainerResourcesRequest, call: Call
    ) -> cri.UpdateContainerResourcesResponse:
        if not request.HasField("linux"):
            raise InvalidArgument("linux is missing: give the resources to set")
        cpusets.check(request.linux, "linux")
        await self._containers.update(request.container_id, request.linux)
        return cri.UpdateContainerResourcesResponse()

    async def ReopenContainerLog(
        self, request: cri.ReopenContainerLogRequest, call: Call
    ) -> cri.ReopenContainerLogResponse:
        await self._containers.reopen_log(request.container_id)
        return cri.ReopenContainerLogResponse()


class ExecCalls(RuntimeExecRpcs):
    """ExecSync: a command in a container, run to its end."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    async def ExecSync(self, request: cri.ExecSyncRequest, call: Call) -> cri.ExecSyncResponse:
        words = validate.command(request.cmd)
        timeout = validate.seconds(request.timeout, "timeout")
        limit = call.time_remaining() if call.deadline is not None else None
        result = await self._containers.exec_sync(request.container_id, words, timeout, limit)
        return cri.ExecSyncResponse(stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code)
