# SPDX-License-Identifier: Apache-2.0
"""A CRI client for the benches, which makes the same calls as kubelet."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageStub, RuntimeStub
from txgrpc import Channel

_T = TypeVar("_T")
CALL_SECONDS = 240.0  # kubelet's timeout of RunPodSandbox
Pod: TypeAlias = tuple[cri.PodSandboxConfig, str]
"""A pod's configuration, and its sandbox's id."""


class Client:
    """The CRI's two services at one socket.

    :ivar socket: its path."""

    def __init__(self, reactor: IReactor, socket: Path) -> None:
        self._reactor = reactor
        self.socket = socket
        self._channel = Channel(reactor, UNIXClientEndpoint(reactor, str(socket)))
        self.runtime = RuntimeStub(self._channel)
        self.images = ImageStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def run_pod(
        self,
        name: str,
        logs: Path,
        annotations: Mapping[str, str] | None = None,
        uid: str = "",
        handler: str = "",
    ) -> Pod:
        """Call RunPodSandbox. :param uid: the pod's; "" means that any will do."""
        config = cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(name=name, uid=uid or secrets.token_hex(8), namespace="bench"),
            hostname=name,
            log_directory=str(logs / name),
            labels={"app": "bench", "io.kubernetes.pod.name": name},
            annotations=dict(annotations or {}),
        )
        request = cri.RunPodSandboxRequest(config=config, runtime_handler=handler)
        response = await self.runtime.RunPodSandbox(request, timeout=CALL_SECONDS)
        return config, response.pod_sandbox_id

    async def create_container(
        self, pod: Pod, name: str, image: str, command: Iterable[str], **config: Any
    ) -> str:  # Any: fields of ContainerConfig
        """Call CreateContainer. Returns the container's id."""
        sandbox_config, sandbox_id = pod
        request = cri.CreateContainerRequest(
            pod_sandbox_id=sandbox_id,
            config=cri.ContainerConfig(
                metadata=cri.ContainerMetadata(name=name),
                image=cri.ImageSpec(image=image),
                command=list(command),
                labels={"io.kubernetes.container.name": name},
                log_path=f"{name}.log",
                **config,
            ),
            sandbox_config=sandbox_config,
        )
        created = await self.runtime.CreateContainer(request, timeout=CALL_SECONDS)
        return created.container_id

    async def start_container(self, container_id: str) -> None:
        """Call StartContainer, which answers once the container runs."""
        request = cri.StartContainerRequest(container_id=container_id)
        await self.runtime.StartContainer(request, timeout=CALL_SECONDS)

    async def run_container(
        self, pod: Pod, name: str, image: str, command: Iterable[str], **config: Any
    ) -> str:  # Any: fields of ContainerConfig
        """Create and start a container. Returns its id."""
        container_id = await self.create_container(pod, name, image, command, **config)
        await self.start_container(container_id)
        return container_id

    async def exec_sync(self, container_id: str, command: Iterable[str]) -> float:
        """Call ExecSync. Returns the seconds it took.

        :raise AssertionError: the command failed.
        """
        request = cri.ExecSyncRequest(container_id=container_id, cmd=list(command), timeout=30)
        seconds, response = await self.timed(lambda: self.runtime.ExecSync(request, timeout=60.0))
        if response.exit_code:
            raise AssertionError(f"{command} ended with {response.exit_code}: {response.stderr!r}")
        return seconds

    async def remove_pod(self, sandbox_id: str) -> None:
        """Call StopPodSandbox and RemovePodSandbox."""
        stop = cri.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
        await self.runtime.StopPodSandbox(stop, timeout=CALL_SECONDS)
        remove = cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id)
        await self.runtime.RemovePodSandbox(remove, timeout=CALL_SECONDS)

    async def timed(self, call: Callable[[], Awaitable[_T]]) -> tuple[float, _T]:
        """Make a call. Returns the seconds it took, and its result."""
        began = self._reactor.seconds()
        result = await call()
        return self._reactor.seconds() - began, result


async def side_by_side(count: int, width: int, job: Callable[[int], Awaitable[_T]]) -> list[_T]:
    """Run `job(0)` to `job(count - 1)`, at most `width` at once. Returns their results in order."""
    results: dict[int, _T] = {}
    rest = iter(range(count))

    async def worker() -> None:
        for number in rest:
            results[number] = await job(number)

    workers = [start(worker()) for _ in range(width)]
    await gatherResults(workers, consumeErrors=True)
    return [results[number] for number in range(count)]
