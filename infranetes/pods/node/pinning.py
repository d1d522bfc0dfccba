# SPDX-License-Identifier: Apache-2.0
"""The node's processors and memory nodes that a pod's containers are pinned to.

kubelet's static CPU and memory managers give them to each container. In a VM these numbers mean nothing, so
they hold for the VM's process on the node: it may use what any of its containers may.
"""

from __future__ import annotations

from twisted.logger import Logger

from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.store.states import ALIVE, ContainerState, SandboxState
from infranetes_common import cpusets
from infranetes_common.concurrency import start
from infranetes_common.wire import cri

_COUNTED = ALIVE | {ContainerState.CREATING}

_log = Logger()


def guests(config: cri.ContainerConfig) -> cri.ContainerConfig:
    """Return the configuration for the agent."""
    if not config.HasField("linux") or not config.linux.HasField("resources"):
        return config
    own = cri.ContainerConfig()
    own.CopyFrom(config)
    own.linux.resources.CopyFrom(cpusets.without(config.linux.resources))
    return own


async def pin(sandbox: Sandbox) -> None:
    """Have the VM, if it is a process of the node, use what its containers may. Idempotent.

    :raise InvalidArgument: the node does not have that.
    :raise InfranetesError: it is not in force."""
    async with sandbox.resizing:
        if sandbox.state is not SandboxState.READY:
            return
        union = _union(sandbox)
        if union != (sandbox.pinned or ("", "")):
            await sandbox.machine.pin(*union)
            sandbox.pinned = union


def pin_later(sandbox: Sandbox) -> None:
    """Do so in the background, because a container has ended."""
    if sandbox.pinned is None or sandbox.pinned == _union(sandbox):
        return
    pinned = start(pin(sandbox))
    pinned.addErrback(
        lambda failure: _log.warn(
            "the VM of sandbox {sandbox} keeps the processors of a container that has ended: {error}",
            sandbox=sandbox.id,
            error=failure.value,
        )
    )


async def repin(inventory: Inventory, container: Container, resources: cri.LinuxContainerResources) -> None:
    """Pin a container to what an update names, if it names something.

    :raise InfranetesError: as `pin`; the container is then pinned to what it was."""
    cpus, mems = cpusets.cpus_of(resources), cpusets.mems_of(resources)
    if not cpus and not mems:
        return
    before = container.record
    config = cri.ContainerConfig.FromString(before.config)
    own = config.linux.resources
    own.cpuset_cpus, own.cpuset_mems = cpus or cpusets.cpus_of(own), mems or cpusets.mems_of(own)
    if config == container.config:
        await pin(container.sandbox)
        return
    container.reconfigure(config)
    try:
        await pin(container.sandbox)
    except BaseException:
        container.reconfigure(cri.ContainerConfig.FromString(before.config))
        raise
    await inventory.save_container(container, container.record)


def _union(sandbox: Sandbox) -> tuple[str, str]:
    limits = [
        container.config.linux.resources
        for container in sandbox.containers.values()
        if container.state in _COUNTED
    ]
    return (
        cpusets.union(map(cpusets.cpus_of, limits), "cpuset_cpus"),
        cpusets.union(map(cpusets.mems_of, limits), "cpuset_mems"),
    )
