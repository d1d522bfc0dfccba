# SPDX-License-Identifier: Apache-2.0
"""Traces of the daemon as a process: from kubelet's call to the agents', at a collector."""

from __future__ import annotations

import signal
import socket
from typing import Any

from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.support.collector import MISSING, Collector, Received
from txgrpc import Code
from txgrpc.metadata import Metadata

TRACE, KUBELET = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = (("traceparent", f"00-{TRACE}-{KUBELET}-01"), ("tracestate", "vendor=1"))
UNSAMPLED = (("traceparent", f"00-{TRACE}-{KUBELET}-00"),)
RUN = "runtime.v1.RuntimeService/RunPodSandbox"
SECRET = "correct horse battery staple"


class TracingCase(DaemonCase):
    """A daemon and a collector."""

    if MISSING:
        skip = MISSING

    def setUp(self) -> None:
        super().setUp()
        self.collector = Collector(reactor)
        self.addCleanup(lambda: start(self.collector.stop()))
        self.config["tracing"] = {"endpoint": self.before(self.collector.endpoint)}
        self.constants = {
            "infranetes.tracing.delivery.PAUSE_SECONDS": 0.2,
            "infranetes.tracing.exported.EXPORT_SECONDS": 1.0,
        }

    def before(self, collector: str) -> str:
        """Return the URL to which the daemon sends the spans that are meant for `collector`."""
        return collector

    async def run_traced(
        self,
        metadata: Metadata = SAMPLED,
        name: str = "web",
        **fields: Any,  # Any: of the PodSandboxConfig
    ) -> str:
        request = cri.RunPodSandboxRequest(config=self.pod(name, **fields))
        answer = await self.runtime.RunPodSandbox(request, timeout=60.0, metadata=metadata)
        return str(answer.pod_sandbox_id)

    async def arrived(self, name: str, count: int = 1) -> list[Received]:
        await self.until(
            lambda: len(self.collector.named(name)) >= count, f"{count} spans {name!r} are collected", 60.0
        )
        return self.collector.named(name)


@needs_registry
class TraceTests(TracingCase):
    """The spans of calls."""

    async def test_a_sandbox_that_kubelet_traces(self) -> None:
        """kubelet's span, the call's, the launch's, its steps', and those of the agent's calls in them."""
        await self.start()
        sandbox = await self.run_traced(
            annotations={"note": SECRET},
            labels={"app": SECRET},
        )
        config = self.box(
            script="sleep 1000", args=[SECRET], envs=[cri.KeyValue(key="PASSWORD", value=SECRET.encode())]
        )
        create = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=config)
        answer = await self.runtime.CreateContainer(create, timeout=60.0, metadata=SAMPLED)
        [run] = await self.arrived(RUN)
        [created] = await self.arrived("runtime.v1.RuntimeService/CreateContainer")

        self.assertEqual((run.trace_id, run.parent_id, run.kind), (TRACE, KUBELET, 2))
        self.assertFalse(run.failed)
        about = {
            "rpc.system": "grpc",
            "rpc.service": "runtime.v1.RuntimeService",
            "rpc.method": "RunPodSandbox",
            "rpc.grpc.status_code": 0,
            "infranetes.sandbox": sandbox,
            "k8s.namespace.name": "default",
            "k8s.pod.name": "web",
            "k8s.pod.uid": "uid-web",
        }
        self.assertEqual(dict(run.attributes), about)
        self.assertEqual(run.resource["service.name"], "infranetes")
        self.assertEqual(created.attributes["infranetes.container"], answer.container_id)

        [launch] = self.collector.below(run)
        self.assertEqual(launch.name, "launch")
        steps = sorted(self.collector.below(launch), key=lambda each: each.begin)
        expected = [
            "the provider is waited for, until it has started",
            "the provider is asked for a VM",
            "the VM starts",
            "the agent in the VM starts, and answers",
            "the VM is made the pod's",
            "the VM joins the pods' network, host ports are opened",
            "the agent's stream of events begins",
            "it is recorded as ready",
        ]
        self.assertEqual([each.name for each in steps], expected)
        self.assertTrue(all(each.during(launch) for each in steps))
        self.assertTrue(launch.during(run))
        [ask] = self.collector.below(steps[1])
        self.assertEqual((ask.name, ask.kind), ("simulated: launch", 3))
        [configure] = [each for each in steps if each.name == "the VM is made the pod's"]
        [configure] = self.collector.below(configure)
        [call] = self.collector.below(configure)
        self.assertEqual((call.name, call.kind), ("infranetes.vmserver.v1.Agent/ConfigureSandbox", 3))
        self.assertEqual(call.attributes["rpc.grpc.status_code"], 0)
        [creation] = self.collector.below(created)
        self.assertEqual(creation.name, "the container is created")
        self.assertIn(
            "infranetes.vmserver.v1.Agent/CreateContainer",
            [each.name for each in self.collector.below(creation)],
        )
        self.assertEqual({each.trace_id for each in self.collector.spans}, {TRACE})
        for body in self.collector.bodies:
            for secret in (SECRET.encode(), b"PASSWORD", b"sleep 1000"):
                self.assertNotIn(secret, body)

    async def test_a_call_that_fails(self) -> None:
        await self.start()
        annotations = {"simulated.infranetes.io/behaviour": "fails", "simulated.infranetes.io/after": "0"}
        await self.refused(Code.UNAVAILABLE, self.run_traced(annotations=annotations))
        [run] = await self.arrived(RUN)
        self.assertTrue(run.failed)
        self.assertEqual(run.attributes["rpc.grpc.status_code"], int(Code.UNAVAILABLE))
        [launch] = self.collector.named("launch")
        self.assertTrue(launch.failed)

    async def test_what_the_caller_does_not_record_is_not_recorded(self) -> None:
        """Nor is a call without any trace context recorded, as the ratio is 0."""
        await self.start()
        await self.run_traced(UNSAMPLED)
        await self.run_traced((("traceparent", "00-nonsense"),), "other")
        await self.run_pod("third")
        await self.runtime.Version(cri.VersionRequest(), timeout=5.0, metadata=SAMPLED)
        await self.arrived("runtime.v1.RuntimeService/Version")
        self.assertEqual({each.name for each in self.collector.spans}, {"runtime.v1.RuntimeService/Version"})

    async def test_the_last_spans_are_sent_when_the_daemon_ends(self) -> None:
        await self.start()
        await self.runtime.Version(cri.VersionRequest(), timeout=5.0, metadata=SAMPLED)
        assert self.process is not None
        self.process.terminate()
        self.assertEqual(await self.ended(60.0), -signal.SIGTERM)
        self.assertEqual(len(self.collector.named("runtime.v1.RuntimeService/Version")), 1)


@needs_registry
class HeaderTests(TracingCase):
    """What requests to the collector have beside spans."""

    async def test_headers_are_sent_and_kept_secret(self) -> None:
        file = self.root / "headers"
        file.write_text(f"# of the collector\nAuthorization: Basic {SECRET}\n")
        file.chmod(0o600)
        self.config["tracing"].update(headers_file=str(file), sampling_ratio=1.0)
        await self.start()
        await self.arrived("runtime.v1.RuntimeService/Status")
        self.assertEqual(self.collector.headers["authorization"], f"Basic {SECRET}")
        self.assertNotIn(SECRET, self.log)


@needs_registry
class TroubleTests(TracingCase):
    """If the collector fails, spans are lost, and nothing else."""

    async def _pods_are_served(self) -> None:
        await self.start()
        sandbox = await self.run_traced()
        await self.run_container(sandbox, self.box(script="sleep 1000"))
        await self.remove_pod(sandbox)

    async def _ends(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.assertEqual(await self.ended(60.0), -signal.SIGTERM)

    @slow(3, "the exporter tries again until its time is over")
    async def test_nobody_listens(self) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # and does not listen
            host, port = unused.getsockname()
            self.config["tracing"]["endpoint"] = f"http://{host}:{port}/v1/traces"
            await self._pods_are_served()
            await self.until(lambda: "does not accept spans" in self.log, "it is logged", 60.0)
            await self.run_traced(name="second")
            await self._ends()
        self.assertEqual(self.log.count("does not accept spans"), 1)
        self.assertRegex(self.log, r"\d+ spans were lost")

    async def test_it_answers_nothing(self) -> None:
        self.collector.answer = 0
        await self._pods_are_served()
        await self.until(lambda: self.collector.bodies, "a request is made", 60.0)
        await self.runtime.Version(cri.VersionRequest(), timeout=5.0, metadata=SAMPLED)
        await self._ends()

    async def test_it_fails_and_recovers(self) -> None:
        self.collector.answer = 500
        await self._pods_are_served()
        await self.until(lambda: "does not accept spans" in self.log, "it is logged", 60.0)
        self.collector.answer = 200
        await self.runtime.Version(cri.VersionRequest(), timeout=5.0, metadata=SAMPLED)
        await self.arrived("runtime.v1.RuntimeService/Version")
        await self.until(lambda: "accepts spans again" in self.log, "it is logged")


@needs_registry
class PoolTests(TracingCase):
    """A VM from the pool, which was launched before the call."""

    def written(self) -> str:
        return super().written() + "\n[[pool.sizes]]\ncount = 1\n"

    async def test_a_sandbox_that_claims_a_vm(self) -> None:
        """The launch that refills the pool is not part of the trace."""
        await self.start()
        await self.until(lambda: "waits in the pool" in self.log, "a VM waits", 60.0)
        await self.run_traced()
        [run] = await self.arrived(RUN)
        claim, launch = sorted(self.collector.below(run), key=lambda each: each.begin)
        self.assertEqual((claim.name, launch.name), ("claim a VM of the pool", "launch"))
        names = {each.name for each in self.collector.below(launch)}
        self.assertIn("the VM is made the pod's", names)
        self.assertEqual([each.name for each in self.collector.spans if each.name == "simulated: launch"], [])
