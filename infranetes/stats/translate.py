# SPDX-License-Identifier: Apache-2.0
"""An agent's figures translated to the CRI's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes_common.wire import cri, vmserver

Owner = TypeVar("Owner", Sandbox, Container)

_NAMED = "stats"  # a key of the owner's cache


def container_stats(container: Container, used: vmserver.ContainerUsage | None) -> cri.ContainerStats:
    """Return a container's figures.

    The writable layer names no filesystem, for it is in the VM: kubelet drops all figures of a container
    whose filesystem the node does not have.

    :param used: None: not known.
    """
    stats = cri.ContainerStats.FromString(_named(container, _container_named))
    if used is None:
        return stats
    if used.HasField("usage"):
        usage = used.usage
        _cpu(stats.cpu, usage)
        if usage.HasField("memory"):
            _memory(stats.memory, usage)
            _swap(stats.swap, usage)
        if usage.HasField("io_pressure"):
            _io(stats.io, usage)
    if used.HasField("written"):
        layer = stats.writable_layer
        layer.timestamp = used.written.time_nanos
        layer.used_bytes.value = used.written.bytes
        layer.inodes_used.value = used.written.inodes
    return stats


def sandbox_stats(
    sandbox: Sandbox, answer: vmserver.StatsResponse, containers: Iterable[cri.ContainerStats]
) -> cri.PodSandboxStats:
    """Return a sandbox's figures: those of its whole VM, and its containers'.

    :param answer: the agent's."""
    usage = answer.machine
    stats = cri.PodSandboxStats.FromString(_named(sandbox, _sandbox_named))
    linux = stats.linux
    _cpu(linux.cpu, usage)
    _memory(linux.memory, usage)
    linux.process.timestamp = usage.time_nanos
    linux.process.process_count.value = usage.processes
    linux.containers.extend(containers)
    if usage.HasField("io_pressure"):
        _io(linux.io, usage)
    if answer.cards:
        first, *_ = cards = [_card(card) for card in answer.cards]
        linux.network.timestamp = usage.time_nanos
        linux.network.default_interface.CopyFrom(first)
        linux.network.interfaces.extend(cards)
    return stats


def _named(owner: Owner, make: Callable[[Owner], Message]) -> bytes:
    """Return whose figures they are, serialized: labels and annotations are parsed faster than copied."""
    named: bytes | None = owner.cache.get(_NAMED)
    if named is None:
        named = owner.cache[_NAMED] = make(owner).SerializeToString()
    return named


def _container_named(container: Container) -> cri.ContainerStats:
    config = container.config
    return cri.ContainerStats(
        attributes=cri.ContainerAttributes(
            id=container.id, metadata=config.metadata, labels=config.labels, annotations=config.annotations
        )
    )


def _sandbox_named(sandbox: Sandbox) -> cri.PodSandboxStats:
    config = sandbox.config
    return cri.PodSandboxStats(
        attributes=cri.PodSandboxAttributes(
            id=sandbox.id, metadata=config.metadata, labels=config.labels, annotations=config.annotations
        )
    )


def _cpu(cpu: cri.CpuUsage, usage: vmserver.Usage) -> None:
    cpu.timestamp = usage.time_nanos
    used = usage.cpu
    cpu.usage_core_nano_seconds.value = used.total_nanos
    if used.HasField("nano_cores"):
        cpu.usage_nano_cores.value = used.nano_cores.value
    if usage.HasField("cpu_pressure"):
        cpu.psi.CopyFrom(usage.cpu_pressure)


def _memory(memory: cri.MemoryUsage, usage: vmserver.Usage) -> None:
    found = usage.memory
    memory.timestamp = usage.time_nanos
    memory.working_set_bytes.value = found.working_set
    memory.usage_bytes.value = found.usage
    memory.rss_bytes.value = found.rss
    memory.page_faults.value = found.page_faults
    memory.major_page_faults.value = found.major_page_faults
    if found.limit:
        memory.available_bytes.value = max(found.limit - found.working_set, 0)
    if usage.HasField("memory_pressure"):
        memory.psi.CopyFrom(usage.memory_pressure)


def _swap(swap: cri.SwapUsage, usage: vmserver.Usage) -> None:
    found = usage.memory
    swap.timestamp = usage.time_nanos
    swap.swap_usage_bytes.value = found.swap
    if found.HasField("swap_limit"):
        swap.swap_available_bytes.value = max(found.swap_limit.value - found.swap, 0)


def _io(io: cri.IoUsage, usage: vmserver.Usage) -> None:
    io.timestamp = usage.time_nanos
    io.psi.CopyFrom(usage.io_pressure)


def _card(card: vmserver.NetworkCard) -> cri.NetworkInterfaceUsage:
    found = cri.NetworkInterfaceUsage(name=card.name)
    found.rx_bytes.value = card.received_bytes
    found.rx_errors.value = card.receive_errors
    found.tx_bytes.value = card.sent_bytes
    found.tx_errors.value = card.send_errors
    return found
