# SPDX-License-Identifier: Apache-2.0
"""The metrics that kubelet serves under /metrics/cadvisor where it takes them from the CRI.

Names and meanings are cAdvisor's, so that dashboards and alerts keep working; what only we have begins with
`infranetes_`. Values are whole numbers, as
in the CRI: seconds are cut. A pod's own metrics have an empty `container` label, as with cAdvisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.providers.interface import RefusedPackets, Share
from infranetes.services.timing import RuleProgress
from infranetes_common.wire import cri, vmserver

LABELS = ("id", "name", "image", "container", "pod", "namespace")

Values = Iterable[tuple[tuple[str, ...], int]]
"""The values of a metric's own labels, each with the number."""

_Of = TypeVar("_Of")


@attrs.frozen
class _Metric(Generic[_Of]):
    """A metric, and the function that reads its values from the object it describes."""

    name: str
    help: str
    kind: cri.MetricType
    values: Callable[[_Of], Values]
    labels: tuple[str, ...] = ()  # besides LABELS


@attrs.frozen
class _Subject:
    """The source of a VM's or a container's metrics. A VM has only the `usage`."""

    usage: vmserver.Usage
    container: vmserver.ContainerUsage = attrs.field(factory=vmserver.ContainerUsage)
    resources: cri.LinuxContainerResources = attrs.field(factory=cri.LinuxContainerResources)


_Cards = Sequence[vmserver.NetworkCard]
_Metrics = tuple[_Metric[_Subject], ...]


def _counter(name: str, help: str, value: Callable[[_Subject], int]) -> _Metric[_Subject]:
    return _Metric(name, help, cri.COUNTER, lambda one: [((), value(one))])


def _gauge(name: str, help: str, value: Callable[[_Subject], int]) -> _Metric[_Subject]:
    return _Metric(name, help, cri.GAUGE, lambda one: [((), value(one))])


def _seconds(nanos: int) -> int:
    return nanos // 10**9


_CPU: _Metrics = (
    _Metric(
        "container_cpu_usage_seconds_total",
        "Processor time used.",
        cri.COUNTER,
        lambda one: [(("total",), _seconds(one.usage.cpu.total_nanos))],
        ("cpu",),
    ),
    _counter("container_cpu_user_seconds_total", "Processor time used by programs.",
             lambda one: _seconds(one.usage.cpu.user_nanos)),
    _counter("container_cpu_system_seconds_total", "Processor time used by the kernel.",
             lambda one: _seconds(one.usage.cpu.system_nanos)),
)  # fmt: skip
_THROTTLING = (
    _counter("container_cpu_cfs_periods_total", "Periods of the processor limit.",
             lambda one: one.usage.cpu.periods),
    _counter("container_cpu_cfs_throttled_periods_total", "Periods in which the processor limit was met.",
             lambda one: one.usage.cpu.throttled_periods),
    _counter("container_cpu_cfs_throttled_seconds_total", "Time held up by the processor limit.",
             lambda one: _seconds(one.usage.cpu.throttled_nanos)),
)  # fmt: skip
_MEMORY: _Metrics = (
    _gauge("container_memory_usage_bytes", "Memory in use, pages of files among it.",
           lambda one: one.usage.memory.usage),
    _gauge("container_memory_working_set_bytes", "Memory in use that is not easily given back.",
           lambda one: one.usage.memory.working_set),
    _gauge("container_memory_rss", "Memory of processes that no file stands for.",
           lambda one: one.usage.memory.rss),
    _gauge("container_memory_cache", "Memory that holds pages of files.",
           lambda one: one.usage.memory.cache),
    _gauge("container_memory_mapped_file", "Memory that holds files mapped by processes.",
           lambda one: one.usage.memory.mapped_file),
    _gauge("container_memory_total_active_file_bytes", "Pages of files used of late.",
           lambda one: one.usage.memory.active_file),
    _gauge("container_memory_total_inactive_file_bytes", "Pages of files not used of late.",
           lambda one: one.usage.memory.inactive_file),
    _gauge("container_memory_kernel_usage", "Memory of the kernel.",
           lambda one: one.usage.memory.kernel),
    _gauge("container_memory_swap", "Memory in swap.",
           lambda one: one.usage.memory.swap),
    _Metric(
        "container_memory_failures_total",
        "Page faults.",
        cri.COUNTER,
        lambda one: [(("pgfault", "container"), one.usage.memory.page_faults),
                     (("pgmajfault", "container"), one.usage.memory.major_page_faults)],
        ("failure_type", "scope"),
    ),
    _counter("container_oom_events_total", "Processes killed for want of memory.",
             lambda one: one.usage.memory.oom_kills),
)  # fmt: skip
_LIMITED_MEMORY = (
    _gauge("container_memory_max_usage_bytes", "The most memory that was in use.",
           lambda one: one.usage.memory.highest_usage),
    _counter("container_memory_failcnt", "How often the memory limit was met.",
             lambda one: one.usage.memory.limit_hits),
)  # fmt: skip
_PROCESSES = (
    _gauge("container_processes", "Processes.", lambda one: one.usage.processes),
    _gauge("container_threads", "Threads.", lambda one: one.usage.threads),
)
_REST = (
    _gauge("container_threads_max", "The most threads that are allowed; 0: no limit.",
           lambda one: one.usage.threads_limit),
    _gauge("container_start_time_seconds", "When it was started, seconds since 1970 UTC.",
           lambda one: _seconds(one.container.started_at)),
    _gauge("container_last_seen", "When it was measured, seconds since 1970 UTC.",
           lambda one: _seconds(one.usage.time_nanos)),
    _gauge("container_spec_cpu_period", "Period of the processor limit, microseconds.",
           lambda one: max(one.resources.cpu_period, 0)),
    _gauge("container_spec_cpu_quota", "Processor time in each period, microseconds; 0: no limit.",
           lambda one: max(one.resources.cpu_quota, 0)),
    _gauge("container_spec_cpu_shares", "Share of the processors.",
           lambda one: max(one.resources.cpu_shares, 0)),
    _gauge("container_spec_memory_limit_bytes", "Memory limit; 0: none.",
           lambda one: max(one.resources.memory_limit_in_bytes, 0)),
    _gauge("container_spec_memory_swap_limit_bytes", "Limit of memory and swap together; 0: none.",
           lambda one: max(one.resources.memory_swap_limit_in_bytes, 0)),
)  # fmt: skip


def _disk(name: str, help: str, field: str) -> _Metric[_Subject]:
    def values(subject: _Subject) -> Values:
        return [((disk.device,), getattr(disk, field)) for disk in subject.usage.disks]

    return _Metric(name, help, cri.COUNTER, values, ("device",))


_DISKS: _Metrics = (
    _disk("container_fs_reads_bytes_total", "Bytes read from disks.", "read_bytes"),
    _disk("container_fs_writes_bytes_total", "Bytes written to disks.", "written_bytes"),
    _disk("container_fs_reads_total", "Reads from disks.", "reads"),
    _disk("container_fs_writes_total", "Writes to disks.", "writes"),
    _Metric(
        "container_fs_usage_bytes",
        "What the container wrote over its image.",
        cri.GAUGE,
        lambda one: [(("rootfs",), one.container.written.bytes)] if one.container.HasField("written") else [],
        ("device",),
    ),
)


def _pressure(resource: str, kind: str, which: str, help: str) -> _Metric[_Subject]:
    def values(subject: _Subject) -> Values:
        field = f"{resource}_pressure"
        if not subject.usage.HasField(field) or not getattr(subject.usage, field).HasField(which):
            return []
        return [((), getattr(getattr(subject.usage, field), which).Total // 10**6)]

    name = f"container_pressure_{resource}_{kind}_seconds_total"
    return _Metric(name, f"Time in which {help} for {resource}.", cri.COUNTER, values)


_PRESSURE = tuple(
    _pressure(resource, *words)
    for resource in ("cpu", "memory", "io")
    for words in (("waiting", "Some", "some task waited"), ("stalled", "Full", "all tasks waited"))
)


def _network(name: str, help: str, field: str) -> _Metric[_Cards]:
    def values(cards: _Cards) -> Values:
        return [((card.name,), getattr(card, field)) for card in cards]

    return _Metric(f"container_network_{name}_total", help, cri.COUNTER, values, ("interface",))


_NETWORK = (
    _network("receive_bytes", "Bytes received.", "received_bytes"),
    _network("receive_packets", "Packets received.", "received_packets"),
    _network("receive_packets_dropped", "Packets dropped while receiving.", "receive_drops"),
    _network("receive_errors", "Errors while receiving.", "receive_errors"),
    _network("transmit_bytes", "Bytes sent.", "sent_bytes"),
    _network("transmit_packets", "Packets sent.", "sent_packets"),
    _network("transmit_packets_dropped", "Packets dropped while sending.", "send_drops"),
    _network("transmit_errors", "Errors while sending.", "send_errors"),
)

_SERVICES: tuple[_Metric[RuleProgress], ...] = (
    _Metric("infranetes_service_rules_current", "Whether the VM has the rules of Services as they are.",
            cri.GAUGE, lambda one: [((), int(one.current))]),
    _Metric("infranetes_service_rules_behind", "Changes of these that the VM lacks.",
            cri.GAUGE, lambda one: [((), one.behind)] if one.behind is not None else []),
    _Metric(
        "infranetes_service_rules_milliseconds",
        "From the API server's word until a change of these was in force: the last one, and quantiles.",
        cri.GAUGE,
        lambda one: [((which,), round(seconds * 1000))
                     for which, seconds in (("last", one.last_seconds), ("0.99", one.p99_seconds))
                     if seconds is not None],
        ("quantile",),
    ),
)  # fmt: skip

_REFUSED: tuple[_Metric[Mapping[Share, RefusedPackets]], ...] = (
    _Metric("infranetes_refused_packets_total", "Packets beyond the pod's share, which were dropped.",
            cri.COUNTER, lambda one: [((share.value,), refused.total) for share, refused in one.items()],
            ("share",)),
)  # fmt: skip

_OF_VMS = (*_CPU, *_MEMORY, *_PROCESSES, *_PRESSURE)
_OF_CONTAINERS = (
    *_CPU, *_THROTTLING, *_MEMORY, *_LIMITED_MEMORY, *_PROCESSES, *_REST, *_DISKS, *_PRESSURE,
)  # fmt: skip


def descriptors() -> list[cri.MetricDescriptor]:
    """Return all metrics that there can be. `label_keys` are in the order of a metric's `label_values`."""
    metrics = [(one.name, one.help, one.labels) for one in _OF_CONTAINERS]
    metrics += [(one.name, one.help, one.labels) for one in _NETWORK]
    metrics += [(one.name, one.help, one.labels) for one in _SERVICES]
    metrics += [(one.name, one.help, one.labels) for one in _REFUSED]
    return [
        cri.MetricDescriptor(name=name, help=help, label_keys=(*LABELS, *labels))
        for name, help, labels in metrics
    ]


def sandbox_metrics(
    sandbox: Sandbox,
    answer: vmserver.StatsResponse,
    progress: RuleProgress | None = None,
    refused: Mapping[Share, RefusedPackets] | None = None,
) -> cri.PodSandboxMetrics:
    """Return a sandbox's metrics: its VM's, and those of the containers that run.

    :param answer: the agent's. :param progress: how far its VM is with the rules of Services; None: it is not
        told of them. :param refused: what its VM was refused."""
    pod = sandbox.config.metadata
    labels = (f"/{sandbox.id}", sandbox.id, "", "", pod.name, pod.namespace)
    result = cri.PodSandboxMetrics(pod_sandbox_id=sandbox.id)
    at = answer.machine.time_nanos
    result.metrics.extend(_metrics(_OF_VMS, _Subject(answer.machine), labels, at))
    result.metrics.extend(_metrics(_NETWORK, answer.cards, labels, at))
    if progress is not None:
        result.metrics.extend(_metrics(_SERVICES, progress, labels, at))
    result.metrics.extend(_metrics(_REFUSED, refused or {}, labels, at))
    for used in answer.containers:
        container = sandbox.containers.get(used.id)
        if container is not None and used.HasField("usage"):
            subject = _Subject(used.usage, used, _resources(container))
            metrics = _metrics(_OF_CONTAINERS, subject, _labels(container), used.usage.time_nanos)
            result.container_metrics.append(cri.ContainerMetrics(container_id=used.id, metrics=metrics))
    return result


def _labels(container: Container) -> tuple[str, ...]:
    sandbox, config = container.sandbox, container.config
    pod = sandbox.config.metadata
    image = config.image.user_specified_image or config.image.image
    path = f"/{sandbox.id}/{container.id}"
    return (path, container.id, image, config.metadata.name, pod.name, pod.namespace)


def _resources(container: Container) -> cri.LinuxContainerResources:
    """Return the limits in force."""
    reported = container.reported
    if reported is not None and reported.HasField("resources"):
        return reported.resources
    return container.config.linux.resources


def _metrics(
    wanted: Iterable[_Metric[_Of]], of: _Of, labels: tuple[str, ...], at: int
) -> Iterator[cri.Metric]:
    for metric in wanted:
        for own_labels, value in metric.values(of):
            yield cri.Metric(
                name=metric.name,
                timestamp=at,
                metric_type=metric.kind,
                label_values=(*labels, *own_labels),
                value=cri.UInt64Value(value=value),
            )
