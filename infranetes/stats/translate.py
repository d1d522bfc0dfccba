# SPDX-License-Identifier: Apache-2.0
"""An agent's figures translated to the CRI's messages."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes_common.wire import cri, vmserver


def container_stats(container: Container, used: vmserver.ContainerUsage | None) -> cri.ContainerStats:
    """Return a container's figures.

    The writable layer names no filesystem, for it is in the VM: kubelet drops all figures of a container
    whose filesystem the node does not have.

    :param used: None: not known.
    """
    config = container.config
    stats = cri.ContainerStats(
        attributes=cri.ContainerAttributes(
            id=container.id, metadata=config.metadata, labels=config.labels, annotations=config.annotations
        )
    )
    if used is None:
        return stats
    if used.HasField("usage"):
        usage = used.usage
        stats.cpu.CopyFrom(_cpu(usage))
        if usage.HasField("memory"):
            stats.memory.CopyFrom(_memory(usage))
            stats.swap.CopyFrom(_swap(usage))
        if usage.HasField("io_pressure"):
            stats.io.CopyFrom(cri.IoUsage(timestamp=usage.time_nanos, psi=usage.io_pressure))
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
    config, usage = sandbox.config, answer.machine
    stats = cri.PodSandboxStats(
        attributes=cri.PodSandboxAttributes(
            id=sandbox.id, metadata=config.metadata, labels=config.labels, annotations=config.annotations
        )
    )
    linux = stats.linux
    linux.cpu.CopyFrom(_cpu(usage))
    linux.memory.CopyFrom(_memory(usage))
    linux.process.timestamp = usage.time_nanos
    linux.process.process_count.value = usage.processes
    linux.containers.extend(containers)
    if usage.HasField("io_pressure"):
        linux.io.CopyFrom(cri.IoUsage(timestamp=usage.time_nanos, psi=usage.io_pressure))
    if answer.cards:
        first, *_ = cards = [_card(card) for card in answer.cards]
        linux.network.timestamp = usage.time_nanos
        linux.network.default_interface.CopyFrom(first)
        linux.network.interfaces.extend(cards)
    return stats


def _cpu(usage: vmserver.Usage) -> cri.CpuUsage:
    cpu = cri.CpuUsage(timestamp=usage.time_nanos)
    cpu.usage_core_nano_seconds.value = usage.cpu.total_nanos
    if usage.cpu.HasField("nano_cores"):
        cpu.usage_nano_cores.value = usage.cpu.nano_cores.value
    if usage.HasField("cpu_pressure"):
        cpu.psi.CopyFrom(usage.cpu_pressure)
    return cpu


def _memory(usage: vmserver.Usage) -> cri.MemoryUsage:
    found = usage.memory
    memory = cri.MemoryUsage(timestamp=usage.time_nanos)
    memory.working_set_bytes.value = found.working_set
    memory.usage_bytes.value = found.usage
    memory.rss_bytes.value = found.rss
    memory.page_faults.value = found.page_faults
    memory.major_page_faults.value = found.major_page_faults
    if found.limit:
        memory.available_bytes.value = max(found.limit - found.working_set, 0)
    if usage.HasField("memory_pressure"):
        memory.psi.CopyFrom(usage.memory_pressure)
    return memory


def _swap(usage: vmserver.Usage) -> cri.SwapUsage:
    swap = cri.SwapUsage(timestamp=usage.time_nanos)
    swap.swap_usage_bytes.value = usage.memory.swap
    if usage.memory.HasField("swap_limit"):
        swap.swap_available_bytes.value = max(usage.memory.swap_limit.value - usage.memory.swap, 0)
    return swap


def _card(card: vmserver.NetworkCard) -> cri.NetworkInterfaceUsage:
    found = cri.NetworkInterfaceUsage(name=card.name)
    found.rx_bytes.value = card.received_bytes
    found.rx_errors.value = card.receive_errors
    found.tx_bytes.value = card.sent_bytes
    found.tx_errors.value = card.send_errors
    return found
