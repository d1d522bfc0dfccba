# SPDX-License-Identifier: Apache-2.0
"""Below whose spans ours are: those of crictl, which has otelgrpc as kubelet has it, and of grpcio."""

from __future__ import annotations

import subprocess
import sys

from twisted.internet.threads import deferToThread

from infranetes_common.concurrency import start
from tests.harness.durations import slow
from tests.harness.needs import needs_tools
from tests.infranetes.daemon.case import ROOT, reactor
from tests.interop.test_crictl import CrictlCase
from tests.support.collector import MISSING, Collector, Received

VERSION = "runtime.v1.RuntimeService/Version"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@needs_tools("crictl")
class CallerTests(CrictlCase):
    """A daemon that records what its callers do."""

    if MISSING:
        skip = MISSING

    async def setUp(self) -> None:
        super().setUp()
        self.collector = Collector(reactor)
        self.addCleanup(lambda: start(self.collector.stop()))
        self.config["tracing"] = {"endpoint": self.collector.endpoint}
        await self.start()

    async def version(self) -> Received:
        await self.until(lambda: self.collector.named(VERSION), "its span is collected", 60.0)
        return self.collector.named(VERSION)[-1]

    @slow(10, "crictl tries for long to send its own spans to nobody")
    async def test_kubernetes_own_client(self) -> None:
        """Its own spans go nowhere here. None of ours is without a parent, or would be recorded then."""
        await self.ran("--enable-tracing", "--tracing-endpoint", "127.0.0.1:1", "version")
        await self.version()
        self.assertTrue(all(int(each.parent_id or "0", 16) for each in self.collector.spans))

    async def test_kubernetes_own_client_that_samples_nothing(self) -> None:
        rate = ("--tracing-sampling-rate-per-million", "0")
        await self.ran("--enable-tracing", "--tracing-endpoint", "127.0.0.1:1", *rate, "version")
        await self.grpcio(f"traceparent=00-{TRACE}-{PARENT}-01")
        span = await self.version()
        self.assertEqual([each.trace_id for each in self.collector.spans], [span.trace_id])

    async def test_grpcio(self) -> None:
        await self.grpcio(f"traceparent=00-{TRACE}-{PARENT}-01", "tracestate=rojo=1", "baggage=a=b")
        span = await self.version()
        self.assertEqual((span.trace_id, span.parent_id), (TRACE, PARENT))

    async def grpcio(self, *metadata: str) -> None:
        command = [sys.executable, "-m", "tests.interop.grpcio_kubelet", str(self.socket), *metadata]
        done = await deferToThread(
            subprocess.run, command, capture_output=True, text=True, timeout=60.0, cwd=ROOT, check=False
        )
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "infranetes"), done.stderr)
