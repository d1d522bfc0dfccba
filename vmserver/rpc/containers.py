# SPDX-License-Identifier: Apache-2.0
"""The calls about one container: its lifecycle, commands and log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from twisted.logger import Logger

from infranetes_common import cpusets
from infranetes_common.concurrency import run_in_thread, shielded
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentContainerRpcs
from txgrpc import Call
from vmserver import validate
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.machine.huge_pages import HugePages
from vmserver.rpc import bounds
from vmserver.rpc.batches import batches
from vmserver.rpc.last_lines import whole
from vmserver.rpc.quota import Quota
from vmserver.volumes.nfs import NfsMounts
from vmserver.volumes.parts import VolumeParts

MACHINE = "machine"  # the provider whose container is the VM: its mounts are made again after a reboot
MAX_OUTPUT_BYTES = 16 * 1024 * 1024

_log = Logger()


class ContainerCalls(AgentContainerRpcs):
    """Validates requests, passes them to the provider, and limits the size of its answers.

    :param parts: where volumes are mounted. :param nfs: mounts those of NFS; None: there are none.
    :param huge_pages: reserves huge pages for containers; None: the machine is shared, and has none.
    :ivar execs: limits the concurrent commands of ExecSync.
    """

    def __init__(
        self,
        reactor: IReactor,
        choice: ProviderChoice,
        parts: VolumeParts,
        nfs: NfsMounts | None = None,
        huge_pages: HugePages | None = None,
        *,
        execs: int,
    ) -> None:
        self._reactor = reactor
        self._choice = choice
        self._parts = parts
        self._nfs = nfs
        self._huge_pages = huge_pages
        self.execs = Quota(execs, "commands are being executed")

    async def CreateContainer(
        self, request: messages.CreateContainerRequest, call: Call
    ) -> messages.CreateContainerResponse:
        config = request.config
        validate.words("config.command", config.command)
        validate.words("config.args", config.args)
        for env in config.envs:
            if not env.key or "=" in env.key or "\0" in env.key or b"\0" in env.value:
                raise InvalidArgument(f"config.envs: {env.key[:80]!r} is no name of a variable, or has a NUL")
        id, image_id = validate.container_id(request.id), validate.image_id(request.image_id)
        if config.linux.HasField("resources"):
            cpusets.clear(config.linux.resources)  # an earlier daemon sends the node's numbers
        try:
            async with self._reserved(id, config.linux.resources):
                await self._place(id, config)
                state = await self._choice.provider.create(id, image_id, config, request.sandbox_config)
        except BaseException:
            await shielded(self._release(id))
            raise
        return messages.CreateContainerResponse(state=bounds.state(state))

    def _reserved(self, id: str, limits: cri.LinuxContainerResources) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._huge_pages is None else self._huge_pages.reserved(id, limits)

    async def _place(self, id: str, config: cri.ContainerConfig) -> None:
        bind = self._choice.provider.name != MACHINE
        for index, mount in enumerate(config.mounts):
            place = partial(self._parts.place, id, index, mount.host_path, bind=bind)
            if self._nfs is not None:
                mount.host_path = await self._nfs.place(mount.host_path, place)
            else:
                mount.host_path = await run_in_thread(self._reactor, place)

    async def _release(self, id: str) -> None:
        try:
            await run_in_thread(self._reactor, self._parts.release, id)
            if self._nfs is not None:
                await self._nfs.release(id)
        except (InfranetesError, OSError) as error:
            _log.warn("the mounts of container {container} could not be removed: {error}",
                      container=id, error=error)  # fmt: skip

    async def StartContainer(
        self, request: messages.StartContainerRequest, call: Call
    ) -> messages.StartContainerResponse:
        state = await self._choice.provider.start_container(validate.container_id(request.id))
        return messages.StartContainerResponse(state=bounds.state(state))

    async def StopContainer(
        self, request: messages.StopContainerRequest, call: Call
    ) -> messages.StopContainerResponse:
        grace = validate.seconds("grace_seconds", request.grace_seconds)
        state = await self._choice.provider.stop_container(validate.container_id(request.id), grace)
        return messages.StopContainerResponse(state=bounds.state(state))

    async def RemoveContainer(
        self, request: messages.RemoveContainerRequest, call: Call
    ) -> messages.RemoveContainerResponse:
        id = validate.container_id(request.id)
        await self._choice.provider.remove(id)
        await self._release(id)
        if self._huge_pages is not None:
            await self._huge_pages.settle()
        return messages.RemoveContainerResponse()

    async def UpdateContainer(
        self, request: messages.UpdateContainerRequest, call: Call
    ) -> messages.UpdateContainerResponse:
        id = validate.container_id(request.id)
        cpusets.clear(request.resources)  # an earlier daemon sends the node's numbers
        async with self._reserved(id, request.resources):
            state = await self._choice.provider.update(id, request.resources)
        return messages.UpdateContainerResponse(state=bounds.state(state))

    async def ListContainers(
        self, request: messages.ListContainersRequest, call: Call
    ) -> messages.ListContainersResponse:
        return messages.ListContainersResponse(containers=await self._choice.provider.containers())

    async def ExecSync(self, request: messages.ExecSyncRequest, call: Call) -> messages.ExecSyncResponse:
        id = validate.container_id(request.id)
        command = validate.command(request.command)
        timeout = validate.seconds("timeout_seconds", request.timeout_seconds)
        max_output = min(request.max_output_bytes or MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES)
        with self.execs.slot():
            result = await self._choice.provider.exec_sync(id, command, float(timeout), max_output)
        return messages.ExecSyncResponse(
            stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code
        )

    async def ReadLog(
        self, request: messages.ReadLogRequest, call: Call
    ) -> AsyncIterator[list[messages.LogRecord]]:
        id = validate.container_id(request.id)
        provider, follow = self._choice.provider, request.follow
        cursor = validate.cursor(request.cursor)
        text = request.text
        records = whole(lambda inner: provider.read_log(id, inner, follow, text), cursor, follow)
        gathered = batches(self._reactor, records)
        try:
            async for batch in gathered:
                yield [bounds.record(record) for record in batch]
        finally:
            await gathered.aclose()
