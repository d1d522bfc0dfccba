# SPDX-License-Identifier: Apache-2.0
"""Kubelet's calls to a node whose containerd may be killed at any time.

A pod whose creation was interrupted is removed, and created again, as kubelet does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs

from infranetes_common.wire import cri
from tests.support.kubelet_calls import (
    STEP_SECONDS,
    KubeletCalls,
    Runtime,
    containers,
    pods,
    run_sandbox,
    state,
)
from txgrpc import Code, GrpcError

ATTEMPTS = 20


@attrs.frozen
class MixedCalls(KubeletCalls):
    """The calls of a kubelet, which makes a pod anew if its sandbox or its container has ended too early.

    :ivar cgroup: the parent of the pods' control groups.
    :ivar again: the names of pods that were made anew, once for each time.
    """

    cgroup: str = ""
    again: list[str] = attrs.field(factory=list)

    async def run(self, name: str, annotations: Mapping[str, str], handler: str = "") -> tuple[str, str]:
        for attempt in range(ATTEMPTS):
            config = self.config(name, annotations)
            config.metadata.attempt = attempt
            config.linux.cgroup_parent = self.cgroup
            sandbox = await self._ask(
                functools.partial(run_sandbox, name=name, config=config, handler=handler)
            )
            container = await self._run_container(name, sandbox, config)
            if container:
                return sandbox, container
            self.again.append(name)
            await self._ask(functools.partial(_remove, name=name))
        raise AssertionError(f"it does not run after {ATTEMPTS} attempts")

    async def _run_container(self, name: str, sandbox: str, config: cri.PodSandboxConfig) -> str:
        """Run the pod's container, and return its id; "": it does not run, or the sandbox is not ready."""
        found = await self._ask(functools.partial(pods, name=name))
        if found != {sandbox: cri.SANDBOX_READY}:
            return ""
        create = self.creation(name, sandbox, config)
        try:
            container = await self._ask(functools.partial(_create, request=create))
            await self._ask(functools.partial(_start, container=container))
            running = await self._ask(functools.partial(state, container=container))
        except _Useless:
            return ""
        return container if running == cri.CONTAINER_RUNNING else ""


class _Useless(Exception):
    """A container or its sandbox is in a state from which the pod can't go on."""


async def _create(runtime: Runtime, request: cri.CreateContainerRequest) -> str:
    found = await containers(runtime, request.pod_sandbox_id)
    if found:
        return next(iter(found))
    await _ready(runtime, request.pod_sandbox_id)
    return str((await runtime.CreateContainer(request, timeout=STEP_SECONDS)).container_id)


async def _start(runtime: Runtime, container: str) -> None:
    now = await state(runtime, container)
    if now == cri.CONTAINER_RUNNING:
        return
    if now != cri.CONTAINER_CREATED:
        raise _Useless
    await runtime.StartContainer(cri.StartContainerRequest(container_id=container), timeout=STEP_SECONDS)


async def _ready(runtime: Runtime, sandbox: str) -> None:
    request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
    try:
        status = (await runtime.PodSandboxStatus(request, timeout=STEP_SECONDS)).status
    except GrpcError as error:
        if error.code is Code.NOT_FOUND:
            raise _Useless from None
        raise
    if status.state != cri.SANDBOX_READY:
        raise _Useless


async def _remove(runtime: Runtime, name: str) -> None:
    """Stop and remove every sandbox of the pod."""
    for sandbox in await pods(runtime, name):
        await runtime.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=sandbox), timeout=STEP_SECONDS)
        request = cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox)
        await runtime.RemovePodSandbox(request, timeout=STEP_SECONDS)
