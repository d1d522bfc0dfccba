# SPDX-License-Identifier: Apache-2.0
"""The agent's calls before a VM is kept, and in a clone of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from infranetes.machines.agent import checks
from infranetes.machines.agent.calls import CHUNK_BYTES, AgentCalls
from infranetes.machines.keeping import Adoption, Hook
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri, vmserver

RELEASE_SECONDS = 30.0
ADOPT_SECONDS = 60.0
_ZEROS = "zeros"  # a volume that is there for a moment
_ZERO_BYTES = 4 * CHUNK_BYTES  # twice what the buffers hold
_MARGIN_SECONDS = 10.0  # added to the time that the guest has


class KeepClient(AgentCalls):
    """The part of AgentClient for VMs that are kept."""

    async def hold(
        self,
        hooks: Mapping[str, Hook],
        volumes: Collection[str],
        *,
        keep_secrets: bool = False,
        seconds: float,
    ) -> list[str]:
        request = vmserver.HoldRequest(volumes=sorted(volumes), keep_secrets=keep_secrets, seconds=seconds)
        for id, hook in hooks.items():
            request.hooks[id].CopyFrom(_to_wire(hook))
        answer = await self._call(self._stub.Hold(request, timeout=seconds + _MARGIN_SECONDS))
        held = checks.checked_held(answer)
        if volumes and not keep_secrets:
            await self._overwrite_buffers()
        return held

    async def _overwrite_buffers(self) -> None:
        """Send zeros, so that the guest's buffers of the agent's port no longer have what came by them last.

        They are 128 pages, each of which keeps its content until it is used again. What they had was perhaps
        a secret."""
        await self._call(self._stub.PutVolume(_zeros(), timeout=RELEASE_SECONDS))
        request = vmserver.RemoveVolumeRequest(id=_ZEROS)
        await self._call(self._stub.RemoveVolume(request, timeout=RELEASE_SECONDS))

    async def release(self) -> None:
        await self._call(self._stub.Release(vmserver.ReleaseRequest(), timeout=RELEASE_SECONDS))

    async def adopt(
        self, containers: Sequence[Adoption], volumes: Mapping[str, str], sandbox: cri.PodSandboxConfig
    ) -> list[vmserver.ContainerState]:
        request = vmserver.AdoptRequest(
            containers=[
                vmserver.Adoption(
                    old_id=container.old_id,
                    new_id=container.new_id,
                    config=container.config,
                    hook=None if container.hook is None else _to_wire(container.hook),
                )
                for container in containers
            ],
            volumes=[vmserver.AdoptedVolume(old_id=old, new_id=new) for old, new in sorted(volumes.items())],
            sandbox_config=sandbox,
        )
        answer = await self._call(self._stub.Adopt(request, timeout=ADOPT_SECONDS))
        states = list(answer.containers)
        if len(states) != len(containers):
            raise InvalidArgument(
                f"its agent was asked to adopt {len(containers)} containers and answered about {len(states)}"
            )
        return [
            checks.checked_adopted(container.new_id, state)
            for container, state in zip(containers, states, strict=True)
        ]


async def _zeros() -> AsyncIterator[vmserver.PutVolumeRequest]:
    """Yield the requests that make a volume of zeros."""
    bounds = vmserver.VolumeBounds(entries=1, bytes=_ZERO_BYTES)
    header = vmserver.VolumeHeader(id=_ZEROS, file=True, in_memory=True, bounds=bounds)
    yield vmserver.PutVolumeRequest(header=header)
    entry = vmserver.VolumeEntry(kind=vmserver.VolumeEntry.FILE, mode=0o600, size=_ZERO_BYTES)
    yield vmserver.PutVolumeRequest(change=vmserver.VolumeChange(entry=entry))
    for _ in range(_ZERO_BYTES // CHUNK_BYTES):
        yield vmserver.PutVolumeRequest(change=vmserver.VolumeChange(data=bytes(CHUNK_BYTES)))


def _to_wire(hook: Hook) -> vmserver.Hook:
    return vmserver.Hook(command=hook.command, signal=hook.signal, seconds=hook.seconds)
