# SPDX-License-Identifier: Apache-2.0
"""The metrics: counters of what an observer is told, and gauges that are taken when they are asked for.

Their labels are bounded: the names of providers and pools in the configuration, and words of closed sets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infranetes.monitoring.gauges import Gauge, Take
from infranetes.observer import CANCELLED, Launch, LaunchKind, LaunchStep

LAUNCHES_KEPT = 40  # for the page
_STEPS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600)  # seconds
_CALLS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 240)
_LAGS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# The steps at which a launch may fail, and the usual reasons. There may be others, but series for all of them
# would be many, and would nearly always be 0.
_FAILING = {
    LaunchKind.NEW: tuple(each for each in LaunchStep if each is not LaunchStep.TURN),
    LaunchKind.CLAIMED: tuple(
        each for each in LaunchStep if each not in (LaunchStep.TURN, LaunchStep.REQUEST)
    ),
    LaunchKind.STARTED: (),  # few nodes have any
    LaunchKind.POOL: (
        LaunchStep.REQUEST,
        LaunchStep.BOOT,
        LaunchStep.AGENT,
        LaunchStep.CONFIGURE,
        LaunchStep.RECORD,
    ),
}
_REASONS = (
    CANCELLED,
    "deadline_exceeded",
    "failed_precondition",
    "internal",
    "invalid_argument",
    "resource_exhausted",
    "unavailable",
)


class Metrics:
    """An `Observer` that counts.

    :ivar registry: holds all metrics. :ivar launches: the last ones, the newest last.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.launches: deque[Launch] = deque(maxlen=LAUNCHES_KEPT)
        ProcessCollector(registry=registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"infranetes_{name}", what, labels, registry=registry)

        def seconds(name: str, what: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"infranetes_{name}_seconds", what, labels, buckets=buckets, registry=registry)

        pods = ("provider", "kind")
        self._launches = counter("launches", "Launches that ended, well or not.", *pods, "outcome")
        self._failures = counter("launch_failures", "Launches that failed.", *pods, "step", "reason")
        self._launch = seconds("launch", "Launches that ended well.", _STEPS, *pods)
        self._step = seconds("launch_step", "Steps of launches that ended well.", _STEPS, *pods, "step")
        self._rpcs = counter("rpcs", "RPCs of the CRI and CSI.", "service", "method", "code")
        self._rpc = seconds("rpc", "RPCs of the CRI and CSI.", _CALLS, "service", "method")
        calls = ("provider", "method")
        self._provider_calls = counter("provider_calls", "Calls to providers.", *calls, "outcome")
        self._provider_call = seconds("provider_call", "Calls to providers.", _CALLS, *calls)
        calls = ("cloud", "action")
        self._cloud_calls = counter("cloud_calls", "Requests to clouds.", *calls, "outcome")
        self._cloud_call = seconds("cloud_call", "Requests to clouds.", _CALLS, *calls)
        self._cloud_wait = seconds("cloud_wait", "Waits for a turn to call a cloud.", _CALLS, *calls)
        self._cloud_retries = counter("cloud_retries", "Requests that were made again.", *calls, "reason")
        self._agents_lost = counter("agents_lost", "Agents that could not be reached any more.", "provider")
        self._orphans_ended = counter("orphans_ended", "Destroyed VMs that no record knew.", "provider")
        self.lag = seconds("reactor_lag", "How late timed calls of the reactor are.", _LAGS)

    def know(self, provider: str) -> None:
        """Show a provider's metrics from the beginning, as 0: rates need a value before the first event."""
        for kind in LaunchKind:
            self._launch.labels(provider, kind.value)
            for outcome in ("ready", "failed"):
                self._launches.labels(provider, kind.value, outcome)
            for step in _FAILING[kind]:
                for reason in _REASONS:
                    self._failures.labels(provider, kind.value, step.value, reason)
        self._agents_lost.labels(provider)
        self._orphans_ended.labels(provider)

    # The methods of `Observer`

    def launched(self, launch: Launch) -> None:
        self.launches.append(launch)
        provider, kind = launch.provider, launch.kind.value
        self._launches.labels(provider, kind, "failed" if launch.reason else "ready").inc()
        if launch.reason:
            step = launch.steps[-1][0].value
            self._failures.labels(provider, kind, step, launch.reason).inc()
            return
        self._launch.labels(provider, kind).observe(launch.seconds)
        for one, seconds in launch.steps:
            self._step.labels(provider, kind, one.value).observe(seconds)

    def answered(self, service: str, method: str, code: str, seconds: float) -> None:
        self._rpcs.labels(service, method, code).inc()
        self._rpc.labels(service, method).observe(seconds)

    def provider_called(self, provider: str, method: str, outcome: str, seconds: float) -> None:
        self._provider_calls.labels(provider, method, outcome).inc()
        self._provider_call.labels(provider, method).observe(seconds)

    def cloud_known(
        self, cloud: str, calls: Iterable[tuple[str, str]], retries: Iterable[tuple[str, str]]
    ) -> None:
        for action, outcome in calls:
            self._cloud_calls.labels(cloud, action, outcome)
        for action, reason in retries:
            self._cloud_retries.labels(cloud, action, reason)

    def cloud_called(self, cloud: str, action: str, outcome: str, waited: float, seconds: float) -> None:
        self._cloud_calls.labels(cloud, action, outcome).inc()
        self._cloud_wait.labels(cloud, action).observe(waited)
        self._cloud_call.labels(cloud, action).observe(seconds)

    def cloud_retried(self, cloud: str, action: str, reason: str) -> None:
        self._cloud_retries.labels(cloud, action, reason).inc()

    def agent_lost(self, provider: str) -> None:
        self._agents_lost.labels(provider).inc()

    def orphan_ended(self, provider: str) -> None:
        self._orphans_ended.labels(provider).inc()


class GaugeCollector(Collector):
    """Shows gauges that were taken in the reactor's thread: the registry may be read in another one."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._taken: Sequence[Gauge] = ()

    def refresh(self) -> None:
        """Take the gauges anew. Call this in the reactor's thread."""
        self._taken = self._take()

    def collect(self) -> Iterable[Metric]:
        for gauge in self._taken:
            family = GaugeMetricFamily(gauge.name, gauge.what, labels=gauge.labels)
            for labels, value in gauge.values.items():
                family.add_metric(labels, value)
            yield family
