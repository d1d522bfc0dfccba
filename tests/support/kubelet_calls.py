# SPDX-License-Identifier: Apache-2.0
"""The calls of a kubelet over a pod's life, each repeated until some daemon answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs

from infranetes_common.wire import cri
from txgrpc import Code, GrpcError

STEP_SECONDS = 60.0

T = TypeVar("T")
Runtime: TypeAlias = Any  # Any: txgrpc makes a stub's methods from the descriptor
Listing = Callable[[Runtime], Awaitable[dict[str, int]]]


class Ask(Protocol):
    """Calls the daemon that runs, and if that dies, repeats the call to the next one."""

    async def __call__(self, step: Callable[[Runtime], Awaitable[T]]) -> T:
        """Return the step's result."""


@attrs.frozen
class KubeletCalls:
    """Runs and removes pods of one container each.

    :ivar image: the containers' image.
    :ivar logs: the directory of the pods' logs.
    """

    _ask: Ask
    image: str
    logs: Path

    async def run(self, name: str, annotations: Mapping[str, str], handler: str = "") -> tuple[str, str]:
        """Run a pod and its container. Returns their ids."""
        config = self.config(name, annotations)
        sandbox = await self._ask(lambda runtime: run_sandbox(runtime, name, config, handler))
        create = self.creation(name, sandbox, config)
        container = await self._ask(lambda runtime: _create_container(runtime, create))
        await self._ask(lambda runtime: _start_container(runtime, container))
        found = await self._ask(lambda runtime: state(runtime, container))
        if found != cri.CONTAINER_RUNNING:
            raise AssertionError(f"its container is {cri.ContainerState.Name(found)} and should run")
        return sandbox, container

    def config(self, name: str, annotations: Mapping[str, str]) -> cri.PodSandboxConfig:
        """Return a pod's configuration."""
        return cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(name=name, uid=name, namespace="soak"),
            hostname=name,
            labels={"name": name},
            annotations=annotations,
            log_directory=str(self.logs),
        )

    def creation(self, name: str, sandbox: str, config: cri.PodSandboxConfig) -> cri.CreateContainerRequest:
        """Return the request that creates the pod's container."""
        box = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name="main"),
            image=cri.ImageSpec(image=self.image),
            log_path=f"{name}.log",
        )
        return cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=box, sandbox_config=config)

    async def remove(self, name: str, sandbox: str, container: str) -> None:
        """Stop and remove a pod and its container.

        :raise AssertionError: the pod or the container was gone before it was to be ended. The calls do not
            show that themselves, because they succeed for unknown ids.
        """

        def listed_pods(runtime: Runtime) -> Awaitable[dict[str, int]]:
            return pods(runtime, name)

        def listed_containers(runtime: Runtime) -> Awaitable[dict[str, int]]:
            return containers(runtime, sandbox)

        stop = cri.StopContainerRequest(container_id=container, timeout=5)
        await self._end("StopContainer", stop, container, listed_containers)
        remove = cri.RemoveContainerRequest(container_id=container)
        await self._end("RemoveContainer", remove, container, listed_containers)
        await self._end(
            "StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox), sandbox, listed_pods
        )
        await self._end(
            "RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox), sandbox, listed_pods
        )
        if await self._ask(listed_pods):
            raise AssertionError("it is removed and still listed")

    async def _end(self, method: str, request: object, id: str, listing: Listing) -> None:
        asked = False

        async def step(runtime: Runtime) -> None:
            nonlocal asked
            if not asked and id not in await listing(runtime):
                raise AssertionError(f"{id} is gone before {method}")
            asked = True
            await getattr(runtime, method)(request, timeout=STEP_SECONDS)

        await self._ask(step)


async def run_sandbox(runtime: Runtime, name: str, config: cri.PodSandboxConfig, handler: str) -> str:
    """Run the pod's sandbox, unless it exists. Return its id."""
    found = await pods(runtime, name)
    if found:
        return next(iter(found))
    request = cri.RunPodSandboxRequest(config=config, runtime_handler=handler)
    return str((await runtime.RunPodSandbox(request, timeout=STEP_SECONDS)).pod_sandbox_id)


async def _create_container(runtime: Runtime, request: cri.CreateContainerRequest) -> str:
    found = await containers(runtime, request.pod_sandbox_id)
    if found:
        return next(iter(found))
    return str((await runtime.CreateContainer(request, timeout=STEP_SECONDS)).container_id)


async def _start_container(runtime: Runtime, container: str) -> None:
    if await state(runtime, container) == cri.CONTAINER_RUNNING:
        return
    try:
        await runtime.StartContainer(cri.StartContainerRequest(container_id=container), timeout=STEP_SECONDS)
    except GrpcError as error:  # an earlier daemon may have started it, which becomes known only now
        started = error.code is Code.FAILED_PRECONDITION
        if not started or await state(runtime, container) != cri.CONTAINER_RUNNING:
            raise


async def state(runtime: Runtime, container: str) -> cri.ContainerState:
    """Return the container's state."""
    request = cri.ContainerStatusRequest(container_id=container)
    status: cri.ContainerStatusResponse = await runtime.ContainerStatus(request, timeout=STEP_SECONDS)
    return status.status.state


async def pods(runtime: Runtime, name: str) -> dict[str, int]:
    """Return the states of a pod's listed sandboxes, by id."""
    request = cri.ListPodSandboxRequest(filter=cri.PodSandboxFilter(label_selector={"name": name}))
    items = (await runtime.ListPodSandbox(request, timeout=STEP_SECONDS)).items
    return {each.id: each.state for each in items}


async def containers(runtime: Runtime, sandbox: str) -> dict[str, int]:
    """Return the states of a sandbox's listed containers, by id."""
    request = cri.ListContainersRequest(filter=cri.ContainerFilter(pod_sandbox_id=sandbox))
    items = (await runtime.ListContainers(request, timeout=STEP_SECONDS)).containers
    return {each.id: each.state for each in items}
