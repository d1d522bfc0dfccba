# SPDX-License-Identifier: Apache-2.0
"""Translating sandboxes and containers into the CRI's messages.

The items of lists are cached in serialized form, with their field's tag and length. So a list of thousands is
one join, instead of thousands of messages that are built, copied and serialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.states import SHOWN_READY, SandboxState
from infranetes.pods.vm.listing import shown_state
from infranetes_common.wire import cri

Listed = TypeVar("Listed", Sandbox, Container)

_ITEM = "item"  # a key of the cache
_TAG = b"\x0a"  # field 1, length-delimited


def sandbox_state(sandbox: Sandbox) -> cri.PodSandboxState:
    """Return the CRI's state of a sandbox: READY or NOTREADY."""
    ready = sandbox.state in SHOWN_READY and not sandbox.interrupted
    return cri.SANDBOX_READY if ready else cri.SANDBOX_NOTREADY


def sandbox_item(sandbox: Sandbox) -> cri.PodSandbox:
    """Return a sandbox's item in lists."""
    config = sandbox.config
    return cri.PodSandbox(
        id=sandbox.id,
        metadata=config.metadata,
        state=sandbox_state(sandbox),
        created_at=sandbox.record.created_at,
        labels=config.labels,
        annotations=config.annotations,
        runtime_handler=sandbox.record.runtime_handler,
    )


def container_item(container: Container) -> cri.Container:
    """Return a container's item in lists."""
    config, record = container.config, container.record
    return cri.Container(
        id=container.id,
        pod_sandbox_id=record.sandbox_id,
        metadata=config.metadata,
        image=_image(config),
        image_ref=record.image_ref,
        state=shown_state(container),
        created_at=record.created_at,
        labels=config.labels,
        annotations=config.annotations,
        image_id=record.image_ref,  # kubelet compares it when it collects unused images
    )


def sandbox_items(sandboxes: Iterable[Sandbox]) -> list[bytes]:
    """Return `framed` items. Joined, they are a ListPodSandboxResponse or a StreamPodSandboxesResponse."""
    return [_cached(sandbox, sandbox_item) for sandbox in sandboxes]


def container_items(containers: Iterable[Container]) -> list[bytes]:
    """Return `framed` items. Joined, they are a ListContainersResponse or a StreamContainersResponse."""
    return [_cached(container, container_item) for container in containers]


def _cached(listed: Listed, make: Callable[[Listed], Message]) -> bytes:
    item: bytes | None = listed.cache.get(_ITEM)
    if item is None:
        item = listed.cache[_ITEM] = framed(make(listed))
    return item


def framed(message: Message) -> bytes:
    """Return a message as an item of a list. All lists of the CRI are field 1 of their response."""
    body = message.SerializeToString()
    return _TAG + _varint(len(body)) + body


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def sandbox_status(sandbox: Sandbox) -> cri.PodSandboxStatus:
    """Return a sandbox's whole status. It has an IP only while the sandbox is READY."""
    config = sandbox.config
    ready = sandbox.state is SandboxState.READY
    return cri.PodSandboxStatus(
        id=sandbox.id,
        metadata=config.metadata,
        state=sandbox_state(sandbox),
        created_at=sandbox.record.created_at,
        network=_network(sandbox) if ready else cri.PodSandboxNetworkStatus(),
        linux=cri.LinuxPodSandboxStatus(
            namespaces=cri.Namespace(options=config.linux.security_context.namespace_options)
        ),
        labels=config.labels,
        annotations=config.annotations,
        runtime_handler=sandbox.record.runtime_handler,
    )


def _network(sandbox: Sandbox) -> cri.PodSandboxNetworkStatus:
    more = sandbox.record.more_addresses.split()
    return cri.PodSandboxNetworkStatus(
        ip=sandbox.record.address, additional_ips=[cri.PodIP(ip=address) for address in more]
    )


def container_status(container: Container) -> cri.ContainerStatus:
    """Return a container's whole status."""
    config, record, seen = container.config, container.record, container.reported
    state = shown_state(container)
    ended = state == cri.CONTAINER_EXITED
    status = cri.ContainerStatus(
        id=container.id,
        metadata=config.metadata,
        state=state,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at if ended else 0,
        exit_code=record.exit_code if ended else 0,
        image=_image(config),
        image_ref=record.image_ref,
        reason=record.reason,
        message=record.message,
        labels=config.labels,
        annotations=config.annotations,
        log_path=log_path(container),
        image_id=record.image_ref,  # kubelet compares it when it collects unused images
        stop_signal=config.stop_signal,
        mounts=config.mounts,
    )
    if state == cri.CONTAINER_UNKNOWN and container.sandbox.watch is not None:
        status.reason = "AgentUnreachable"
        status.message = container.sandbox.watch.trouble
    status.resources.linux.CopyFrom(container.limits)
    # The node's own numbers, of which the agent knows nothing.
    status.resources.linux.cpuset_cpus = config.linux.resources.cpuset_cpus
    status.resources.linux.cpuset_mems = config.linux.resources.cpuset_mems
    if seen is not None and seen.HasField("user"):
        status.user.CopyFrom(seen.user)
    return status


def container_statuses(sandbox: Sandbox) -> list[cri.ContainerStatus]:
    """Return the status of each container of a sandbox that lists show."""
    return [container_status(container) for container in sandbox.containers.values() if container.shown]


def _image(config: cri.ContainerConfig) -> cri.ImageSpec:
    """Return the image as the user named it: kubelet resolves that to an id, but sends the name too."""
    spec = cri.ImageSpec()
    spec.CopyFrom(config.image)
    if spec.user_specified_image:
        spec.image = spec.user_specified_image
    return spec


def log_path(container: Container) -> str:
    """Return the path of the log file on the node, or "" if the container has no log."""
    directory, path = container.sandbox.config.log_directory, container.config.log_path
    return f"{directory.rstrip('/')}/{path}" if directory and path else ""
