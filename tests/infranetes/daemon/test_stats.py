# SPDX-License-Identifier: Apache-2.0
"""Stats and metrics through the socket, from simulated VMs whose containers are real processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from twisted.internet.defer import Deferred

from infranetes.stats import metrics
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code

BUSY = "while :; do :; done"
PODS, UNREACHABLE = 20, 16
CALL_SECONDS = 30.0
WAIT_SECONDS = 5.0  # for VMs that are silent: half of those above, which take 40 s if asked one by one


@needs_registry
class StatsCase(DaemonCase):
    """Methods that ask for stats."""

    async def list_pods(self, **wanted: Any) -> dict[str, Any]:
        request = cri.ListPodSandboxStatsRequest(filter=cri.PodSandboxStatsFilter(**wanted))
        answer = await self.runtime.ListPodSandboxStats(request, timeout=CALL_SECONDS)
        return {one.attributes.id: one for one in answer.stats}

    async def list_containers(self, **wanted: Any) -> dict[str, Any]:
        request = cri.ListContainerStatsRequest(filter=cri.ContainerStatsFilter(**wanted))
        answer = await self.runtime.ListContainerStats(request, timeout=CALL_SECONDS)
        return {one.attributes.id: one for one in answer.stats}

    async def listed(self, lists: Any, expected: Iterable[str], **wanted: Any) -> dict[str, Any]:
        """Return a list's content once it has the expected ids; the first list may lack some."""
        ids, until = set(expected), time.monotonic() + 60.0
        while True:
            found: dict[str, Any] = await lists(**wanted)
            if set(found) == ids:
                return found
            self.assertLess(time.monotonic(), until, f"{wanted}: {set(found)}, not {ids}")
            await self.sleep(0.1)

    async def container_stats(self, container: str) -> Any:
        request = cri.ContainerStatsRequest(container_id=container)
        return (await self.runtime.ContainerStats(request, timeout=30.0)).stats

    async def used(self, container: str, seconds: float) -> Any:
        """Return a container's stats once it has used that much processor time."""
        until = time.monotonic() + 60.0
        while True:
            stats = await self.container_stats(container)
            if stats.cpu.usage_core_nano_seconds.value > seconds * 1e9:
                return stats
            if time.monotonic() > until:
                self.fail(f"it uses no processor: {stats}")
            await self.sleep(0.1)


class StatsTests(StatsCase):
    """Pods whose VMs answer."""

    async def test_what_a_container_and_its_pod_use(self) -> None:
        await self.start()
        sandbox = await self.run_pod(labels={"app": "web"}, annotations={"x": "y"})
        busy = await self.run_container(sandbox, self.box("busy", BUSY, labels={"l": "busy"}))
        created = await self.create(sandbox, self.box("created"))
        stats = await self.used(busy, 0.1)
        self.assertEqual(
            (stats.attributes.metadata.name, dict(stats.attributes.labels)), ("busy", {"l": "busy"})
        )
        self.assertGreater(stats.cpu.usage_nano_cores.value, 0)
        self.assertLess(abs(stats.cpu.timestamp - time.time_ns()), 60 * 10**9)
        self.assertGreater(stats.memory.working_set_bytes.value, 10_000)
        self.assertGreater(stats.memory.page_faults.value, 0)
        idle = await self.container_stats(created)
        self.assertEqual(idle.attributes.id, created)
        self.assertFalse(idle.HasField("cpu"))
        listed = await self.listed(self.list_containers, [busy, created])
        self.assertGreaterEqual(
            listed[busy].cpu.usage_core_nano_seconds.value, stats.cpu.usage_core_nano_seconds.value
        )
        pod = (await self.listed(self.list_pods, [sandbox]))[sandbox]
        self.assertEqual(dict(pod.attributes.annotations), {"x": "y"})
        self.assertGreater(pod.linux.cpu.usage_core_nano_seconds.value, 0)
        self.assertEqual(pod.linux.process.process_count.value, 1)
        self.assertEqual({one.attributes.id for one in pod.linux.containers}, {busy, created})
        request = cri.PodSandboxStatsRequest(pod_sandbox_id=sandbox)
        alone = (await self.runtime.PodSandboxStats(request, timeout=10.0)).stats
        self.assertEqual(alone.attributes, pod.attributes)

    async def test_filters_unknown_ids_and_what_has_ended(self) -> None:
        await self.start()
        web = await self.run_pod("web", labels={"app": "web"})
        db = await self.run_pod("db", labels={"app": "db"})
        one = await self.run_container(web, self.box("one", "sleep 1000", labels={"n": "1"}))
        two = await self.run_container(db, self.box("two", "sleep 1000", labels={"n": "2"}))
        for wanted, found in (
            ({}, {one, two}),
            ({"id": one}, {one}),
            ({"id": one[:12]}, {one}),
            ({"id": "f" * 32}, set()),
            ({"pod_sandbox_id": db}, {two}),
            ({"pod_sandbox_id": db, "id": one}, set()),
            ({"label_selector": {"n": "1"}}, {one}),
        ):
            await self.listed(self.list_containers, found, **wanted)
        for wanted, found in (
            ({"id": web}, {web}),
            ({"id": "f" * 32}, set()),
            ({"label_selector": {"app": "db"}}, {db}),
        ):
            await self.listed(self.list_pods, found, **wanted)
        unknown = cri.ContainerStatsRequest(container_id="f" * 32)
        await self.refused(Code.NOT_FOUND, self.runtime.ContainerStats(unknown, timeout=10.0))
        nobody = cri.PodSandboxStatsRequest(pod_sandbox_id="f" * 32)
        await self.refused(Code.NOT_FOUND, self.runtime.PodSandboxStats(nobody, timeout=10.0))
        await self.stop_pod(db)
        await self.listed(self.list_pods, [web])
        ended = (await self.listed(self.list_containers, [one, two]))[two]
        self.assertFalse(ended.HasField("cpu"))
        gone = cri.PodSandboxStatsRequest(pod_sandbox_id=db)
        words = await self.refused(Code.FAILED_PRECONDITION, self.runtime.PodSandboxStats(gone, timeout=10.0))
        self.assertIn("stopped", words)

    async def test_metrics_are_as_they_are_described(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box("main", BUSY))
        await self.used(container, 1.0)
        described = await self.runtime.ListMetricDescriptors(cri.ListMetricDescriptorsRequest(), timeout=10.0)
        keys = {one.name: list(one.label_keys) for one in described.descriptors}
        answer = await self.runtime.ListPodSandboxMetrics(cri.ListPodSandboxMetricsRequest(), timeout=10.0)
        (pod,) = answer.pod_metrics
        self.assertEqual(pod.pod_sandbox_id, sandbox)
        (of_container,) = pod.container_metrics
        found = {}
        for metric in (*pod.metrics, *of_container.metrics):
            labels = dict(zip(keys[metric.name], metric.label_values, strict=True))
            self.assertEqual((labels["pod"], labels["namespace"]), ("web", "default"))
            found[metric.name, labels["container"]] = metric.value.value
        self.assertGreaterEqual(found["container_cpu_usage_seconds_total", "main"], 1)
        self.assertGreaterEqual(found["container_cpu_usage_seconds_total", ""], 1)
        self.assertGreater(found["container_memory_working_set_bytes", "main"], 10_000)
        self.assertEqual(found["container_processes", "main"], 1)

    async def test_streams_bring_what_lists_do(self) -> None:
        await self.start()
        pods = [await self.run_pod(f"p{number}", labels={"n": str(number % 2)}) for number in range(3)]
        containers = [await self.run_container(pod, self.box("main", "sleep 1000")) for pod in pods]

        async def read(stream: Any, field: str) -> list[Any]:
            return [one async for message in stream for one in getattr(message, field)]

        runtime, wanted = self.runtime, {"n": "1"}
        for found, ids in (
            (
                read(
                    runtime.StreamPodSandboxes(cri.StreamPodSandboxesRequest(), timeout=10.0), "pod_sandboxes"
                ),
                pods,
            ),
            (
                read(
                    runtime.StreamPodSandboxes(
                        cri.StreamPodSandboxesRequest(filter=cri.PodSandboxFilter(label_selector=wanted)),
                        timeout=10.0,
                    ),
                    "pod_sandboxes",
                ),
                pods[1:2],
            ),
            (
                read(runtime.StreamContainers(cri.StreamContainersRequest(), timeout=10.0), "containers"),
                containers,
            ),
            (
                read(
                    runtime.StreamContainers(
                        cri.StreamContainersRequest(filter=cri.ContainerFilter(pod_sandbox_id=pods[0])),
                        timeout=10.0,
                    ),
                    "containers",
                ),
                containers[:1],
            ),
        ):
            self.assertEqual(sorted(one.id for one in await found), sorted(ids))

        async def of_containers(**wanted: Any) -> dict[str, Any]:
            request = cri.StreamContainerStatsRequest(filter=cri.ContainerStatsFilter(**wanted))
            found = await read(runtime.StreamContainerStats(request, timeout=30.0), "container_stats")
            return {one.attributes.id: one for one in found}

        async def of_pods(**wanted: Any) -> dict[str, Any]:
            request = cri.StreamPodSandboxStatsRequest(filter=cri.PodSandboxStatsFilter(**wanted))
            found = await read(runtime.StreamPodSandboxStats(request, timeout=30.0), "pod_sandbox_stats")
            return {one.attributes.id: one for one in found}

        async def of_metrics() -> dict[str, Any]:
            request = cri.StreamPodSandboxMetricsRequest()
            found = await read(runtime.StreamPodSandboxMetrics(request, timeout=30.0), "pod_sandbox_metrics")
            return {one.pod_sandbox_id: one for one in found}

        stats = await self.listed(of_containers, containers[2:], id=containers[2])
        self.assertGreater(stats[containers[2]].memory.working_set_bytes.value, 0)
        await self.listed(of_pods, [pods[0], pods[2]], label_selector={"n": "0"})
        await self.listed(of_metrics, pods)
        images = await read(
            self.image_service.StreamImages(cri.StreamImagesRequest(), timeout=10.0), "images"
        )
        listed = (await self.image_service.ListImages(cri.ListImagesRequest(), timeout=10.0)).images
        self.assertEqual(images, list(listed))
        self.assertEqual(len(images), 1)
        nothing = cri.StreamImagesRequest(filter=cri.ImageFilter(image=cri.ImageSpec(image="nothing")))
        self.assertEqual(await read(self.image_service.StreamImages(nothing, timeout=10.0), "images"), [])


@slow(9, "twenty pods are made, and lists wait for sixteen that are silent")
class UnreachableTests(StatsCase):
    """Many VMs that accept connections and send nothing, or that don't even accept them."""

    async def test_they_are_left_out_and_no_list_waits_for_them(self) -> None:
        self.config["times"] = {"unknown_after": 1.0}
        self.constants = {"infranetes.stats.gather.WAIT_SECONDS": WAIT_SECONDS}
        await self.start()
        pods = [await self.run_pod(f"p{number}") for number in range(PODS)]
        making = [
            Deferred.fromCoroutine(self.run_container(pod, self.box(script="sleep 1000"))) for pod in pods
        ]
        containers = [await one for one in making]
        await self.listed(self.list_pods, pods)
        machines = {vm["sandbox_id"]: vm["id"] for vm in await self.vms()}
        for number, pod in enumerate(pods[:UNREACHABLE]):
            behaviour = ("unreachable", "no-agent")[number % 2]
            await self.farm("behave", id=machines[pod], behaviour=behaviour, after=0)
        well = set(pods[UNREACHABLE:])
        for _ in range(3):
            await self.listed(self.list_pods, well)
            await self.listed(self.list_containers, containers[UNREACHABLE:])
        words = await self.refused(
            Code.UNAVAILABLE,
            self.runtime.ContainerStats(cri.ContainerStatsRequest(container_id=containers[0]), timeout=30.0),
        )
        self.assertIn(containers[0], words)
        answer = await self.runtime.ListPodSandboxMetrics(cri.ListPodSandboxMetricsRequest(), timeout=30.0)
        found = {one.pod_sandbox_id: one for one in answer.pod_metrics}
        self.assertTrue(set(found) >= well)
        for pod in set(found) - well:  # their last stats, with the time of those
            self.assertLess(found[pod].metrics[0].timestamp, found[pods[-1]].metrics[0].timestamp)
        self.assertEqual(
            set(metrics.LABELS) - {"id", "name", "image", "container", "pod", "namespace"}, set()
        )
        await self.farm("behave", id=machines[pods[0]], behaviour="normal", after=0)
        await self.listed(self.list_pods, {pods[0], *well})
