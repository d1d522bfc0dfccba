# SPDX-License-Identifier: Apache-2.0
"""An agent's stats are translated to the CRI's messages and to cAdvisor's metrics."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.records import ContainerRecord, SandboxRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.interface import RefusedPackets, Share
from infranetes.services.timing import RuleProgress
from infranetes.stats import metrics
from infranetes.stats.translate import container_stats, sandbox_stats
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.fakes import box, lone_sandbox, pod

SECOND = 10**9


def sandbox() -> Sandbox:
    config = pod("web", labels={"app": "web"}, annotations={"a": "b"})
    return lone_sandbox(
        SandboxRecord("5a", "t", SandboxState.READY, "n", config.SerializeToString(), "", 1, "fake", "docker")
    )


def container(of: Sandbox, id: str = "c0", name: str = "main") -> Container:
    config = box(name, labels={"l": "m"})
    config.image.user_specified_image = "docker.io/library/busybox:1"
    config.linux.resources.memory_limit_in_bytes = 64 << 20
    record = ContainerRecord(id, of.id, ContainerState.RUNNING, config.SerializeToString(), "i", "i", 1)
    made = Container(of, record)
    of.containers[id] = made
    return made


def usage(**changes: Any) -> Any:
    found = vmserver.Usage(time_nanos=7 * SECOND, processes=3, threads=9, **changes)
    found.cpu.total_nanos = 2 * SECOND + 5
    found.cpu.user_nanos = SECOND
    found.cpu.nano_cores.value = 12345
    found.memory.usage = 50 << 20
    found.memory.working_set = 40 << 20
    found.memory.rss = 30 << 20
    found.memory.limit = 64 << 20
    found.memory.page_faults = 11
    found.memory.major_page_faults = 2
    return found


def used(id: str = "c0") -> Any:
    found = vmserver.ContainerUsage(id=id, usage=usage(), started_at=3 * SECOND)
    found.written.time_nanos = 6 * SECOND
    found.written.bytes = 4096
    found.written.inodes = 2
    return found


def answer() -> Any:
    found = vmserver.StatsResponse(machine=usage(), containers=[used()])
    found.machine.cpu_pressure.Some.Total = 5 * 10**6
    found.cards.add(name="ens3", received_bytes=10, receive_errors=1, sent_bytes=20, send_errors=2)
    found.cards.add(name="ens4", received_packets=5)
    return found


class StatsTests(SynchronousTestCase):
    """ContainerStats and PodSandboxStats."""

    def test_a_container_that_runs(self) -> None:
        stats = container_stats(container(sandbox()), used())
        self.assertEqual((stats.attributes.id, stats.attributes.metadata.name), ("c0", "main"))
        self.assertEqual(dict(stats.attributes.labels), {"l": "m"})
        self.assertEqual(stats.cpu.timestamp, 7 * SECOND)
        self.assertEqual(stats.cpu.usage_core_nano_seconds.value, 2 * SECOND + 5)
        self.assertEqual(stats.cpu.usage_nano_cores.value, 12345)
        memory = stats.memory
        self.assertEqual((memory.usage_bytes.value, memory.working_set_bytes.value), (50 << 20, 40 << 20))
        self.assertEqual((memory.available_bytes.value, memory.rss_bytes.value), (24 << 20, 30 << 20))
        self.assertEqual((memory.page_faults.value, memory.major_page_faults.value), (11, 2))
        layer = stats.writable_layer
        self.assertEqual(
            (layer.timestamp, layer.used_bytes.value, layer.inodes_used.value), (6 * SECOND, 4096, 2)
        )
        self.assertFalse(layer.HasField("fs_id"))
        self.assertFalse(stats.HasField("io"))
        self.assertFalse(stats.cpu.HasField("psi"))

    def test_what_is_not_known_is_absent(self) -> None:
        found = used()
        found.ClearField("written")
        found.usage.cpu.ClearField("nano_cores")
        found.usage.memory.limit = 0
        stats = container_stats(container(sandbox()), found)
        self.assertFalse(stats.HasField("writable_layer"))
        self.assertFalse(stats.cpu.HasField("usage_nano_cores"))
        self.assertFalse(stats.memory.HasField("available_bytes"))
        self.assertFalse(stats.swap.HasField("swap_available_bytes"))

    def test_one_that_does_not_run_is_who_it_is(self) -> None:
        for nothing in (None, vmserver.ContainerUsage(id="c0")):
            stats = container_stats(container(sandbox()), nothing)
            self.assertEqual(stats.attributes.id, "c0")
            self.assertEqual([field.name for field, _ in stats.ListFields()], ["attributes"])

    def test_a_sandbox_is_its_vm_and_its_containers(self) -> None:
        of = sandbox()
        stats = sandbox_stats(of, answer(), [container_stats(container(of), used())])
        self.assertEqual((stats.attributes.id, stats.attributes.metadata.name), ("5a", "web"))
        self.assertEqual(dict(stats.attributes.annotations), {"a": "b"})
        linux = stats.linux
        self.assertEqual(linux.cpu.usage_core_nano_seconds.value, 2 * SECOND + 5)
        self.assertEqual(linux.cpu.psi.Some.Total, 5 * 10**6)
        self.assertEqual(linux.process.process_count.value, 3)
        self.assertEqual([one.attributes.id for one in linux.containers], ["c0"])
        first = linux.network.default_interface
        self.assertEqual((first.name, first.rx_bytes.value, first.tx_bytes.value), ("ens3", 10, 20))
        self.assertEqual((first.rx_errors.value, first.tx_errors.value), (1, 2))
        self.assertEqual([card.name for card in linux.network.interfaces], ["ens3", "ens4"])
        self.assertFalse(stats.HasField("windows"))

    def test_figures_name_who_it_is_now(self) -> None:
        """Labels are copied once, until an update of the container changes them."""
        of = container(sandbox())
        self.assertEqual(dict(container_stats(of, used()).attributes.labels), {"l": "m"})
        config = box("main", labels={"l": "new"})
        of.reconfigure(config)
        self.assertEqual(dict(container_stats(of, used()).attributes.labels), {"l": "new"})

    def test_without_cards_there_is_no_network(self) -> None:
        found = answer()
        found.ClearField("cards")
        self.assertFalse(sandbox_stats(sandbox(), found, []).linux.HasField("network"))


class MetricsTests(SynchronousTestCase):
    """The metrics that replace /metrics/cadvisor."""

    def setUp(self) -> None:
        self.keys = {one.name: list(one.label_keys) for one in metrics.descriptors()}
        of = sandbox()
        container(of)
        progress = RuleProgress(7, 3, "", 1.0, 0.25, 1.5, 9)
        refused = {Share.CONNECTIONS: RefusedPackets(300, 2)}
        self.found = metrics.sandbox_metrics(of, answer(), progress, refused)

    def labels(self, metric: Any) -> dict[str, str]:
        return dict(zip(self.keys[metric.name], metric.label_values, strict=True))

    def values(self, found: Any, name: str) -> dict[tuple[str, ...], int]:
        """Return the values by the metric's own labels."""
        return {
            tuple(one.label_values[len(metrics.LABELS) :]): one.value.value
            for one in found
            if one.name == name
        }

    def test_each_name_is_described_once(self) -> None:
        self.assertEqual(len(self.keys), len(metrics.descriptors()))
        for one in metrics.descriptors():
            self.assertRegex(one.name, r"\A(container|infranetes)_[a-z_]+\Z")
            self.assertTrue(one.help)
            self.assertEqual(len(set(one.label_keys)), len(one.label_keys))
            self.assertEqual(tuple(one.label_keys[: len(metrics.LABELS)]), metrics.LABELS)

    def test_each_metric_is_described_and_has_that_many_labels_and_a_time(self) -> None:
        (of_container,) = self.found.container_metrics
        for metric in (*self.found.metrics, *of_container.metrics):
            self.labels(metric)
            self.assertEqual(metric.timestamp, 7 * SECOND)
            self.assertTrue(metric.HasField("value"))

    def test_no_two_have_the_same_name_and_labels(self) -> None:
        """Otherwise Prometheus refuses all of them."""
        everything = [*self.found.metrics, *self.found.container_metrics[0].metrics]
        self.assertEqual(len({(one.name, *one.label_values) for one in everything}), len(everything))

    def test_a_containers_labels_are_those_that_dashboards_ask_for(self) -> None:
        (of_container,) = self.found.container_metrics
        self.assertEqual(of_container.container_id, "c0")
        labels = self.labels(of_container.metrics[1])
        self.assertEqual(
            labels,
            {
                "id": "/5a/c0",
                "name": "c0",
                "image": "docker.io/library/busybox:1",
                "container": "main",
                "pod": "web",
                "namespace": "default",
            },
        )
        self.assertEqual(self.labels(self.found.metrics[1])["container"], "")
        self.assertEqual(self.labels(self.found.metrics[1])["pod"], "web")

    def test_figures(self) -> None:
        of_container = self.found.container_metrics[0].metrics
        for name, values in {
            "container_cpu_usage_seconds_total": {("total",): 2},
            "container_cpu_user_seconds_total": {(): 1},
            "container_memory_working_set_bytes": {(): 40 << 20},
            "container_memory_failures_total": {("pgfault", "container"): 11, ("pgmajfault", "container"): 2},
            "container_spec_memory_limit_bytes": {(): 64 << 20},
            "container_start_time_seconds": {(): 3},
            "container_fs_usage_bytes": {("rootfs",): 4096},
            "container_processes": {(): 3},
            "container_pressure_cpu_waiting_seconds_total": {},
            "container_network_receive_bytes_total": {},
        }.items():
            self.assertEqual(self.values(of_container, name), values, name)
        machine = self.found.metrics
        for name, values in {
            "container_network_receive_bytes_total": {("ens3",): 10, ("ens4",): 0},
            "container_network_receive_packets_total": {("ens3",): 0, ("ens4",): 5},
            "container_network_transmit_errors_total": {("ens3",): 2, ("ens4",): 0},
            "container_pressure_cpu_waiting_seconds_total": {(): 5},
            "container_spec_memory_limit_bytes": {},
            "container_memory_rss": {(): 30 << 20},
            "infranetes_service_rules_current": {(): 0},
            "infranetes_service_rules_behind": {(): 3},
            "infranetes_refused_packets_total": {("connections",): 300},
            "infranetes_service_rules_milliseconds": {("last",): 250, ("0.99",): 1500},
        }.items():
            self.assertEqual(self.values(machine, name), values, name)

    def test_a_pod_that_is_not_told_of_services_has_no_figures_of_them(self) -> None:
        found = metrics.sandbox_metrics(sandbox(), answer())
        self.assertEqual([one.name for one in found.metrics if one.name.startswith("infranetes")], [])

    def test_counters_are_those_that_only_grow(self) -> None:
        kinds = {one.name: one.metric_type for one in self.found.container_metrics[0].metrics}
        self.assertEqual(kinds["container_cpu_usage_seconds_total"], cri.COUNTER)
        self.assertEqual(kinds["container_memory_usage_bytes"], cri.GAUGE)
        for name, kind in kinds.items():
            self.assertTrue(kind == cri.COUNTER or not name.endswith("_total"), name)

    def test_containers_that_do_not_run_or_are_not_ours_have_none(self) -> None:
        found = vmserver.StatsResponse(
            machine=usage(), containers=[used("other"), vmserver.ContainerUsage(id="c0")]
        )
        of = sandbox()
        container(of)
        self.assertEqual(list(metrics.sandbox_metrics(of, found).container_metrics), [])
