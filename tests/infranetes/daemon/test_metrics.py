# SPDX-License-Identifier: Apache-2.0
"""The metrics of a real daemon with simulated VMs."""

from __future__ import annotations

import time

from infranetes_common.wire import cri
from infranetes_simulation.provider.settings import BEHAVIOUR_ANNOTATION, FAILS
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.metrics import MetricsCase
from tests.infranetes.monitoring.client import get
from txgrpc import GrpcError

RUNTIME = "runtime.v1.RuntimeService"


@needs_registry
class MetricsTests(MetricsCase):
    """What is counted while pods come and go."""

    async def test_a_pod_that_runs_and_one_that_does_not(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        await self.run_container(sandbox, self.box(script="sleep 600"))
        failing = self.pod("bad", annotations={BEHAVIOUR_ANNOTATION: FAILS})
        with self.assertRaises(GrpcError) as refused:
            await self.run_pod("bad", failing)
        code = refused.exception.code.name
        found = await self.samples()

        def value(name: str, **labels: str) -> float:
            return found[f"infranetes_{name}", frozenset(labels.items())]

        new = {"provider": "simulated", "kind": "new"}
        self.assertEqual(value("launches_total", outcome="ready", **new), 1)
        self.assertEqual(value("launches_total", outcome="failed", **new), 1)
        self.assertEqual(
            value("launch_failures_total", step="request", reason=code.lower(), **new), 1, self.log[-3000:]
        )
        boot = value("launch_step_seconds_sum", step="boot", **new)
        self.assertGreater(boot, 0.0)
        self.assertGreaterEqual(value("launch_seconds_sum", **new), boot)
        self.assertEqual(value("rpcs_total", service=RUNTIME, method="RunPodSandbox", code="OK"), 1)
        self.assertEqual(value("rpcs_total", service=RUNTIME, method="RunPodSandbox", code=code), 1)
        self.assertEqual(
            value("provider_calls_total", provider="simulated", method="launch", outcome="ok"), 1
        )
        self.assertEqual(value("sandboxes", provider="simulated", state="ready"), 1)
        self.assertEqual(value("containers", state="running"), 1)
        self.assertEqual(value("agents", provider="simulated", reach="live"), 1)
        self.assertGreater(found["process_resident_memory_bytes", frozenset()], 1_000_000)
        page = (await get(self.url)).body
        for words in ("default/web", sandbox[:13], "10.89.", "1 of 1 run", "default/bad", "request: "):
            self.assertIn(words, page)

    async def test_ready_as_status_says(self) -> None:
        await self.start()
        self.assertEqual((await get(self.url + "readyz")).status, 200)
        self.assertEqual(await self.value("ready"), 1)
        status = await self.runtime.Status(cri.StatusRequest(), timeout=10.0)
        self.assertTrue(all(each.status for each in status.status.conditions))

    async def test_a_daemon_whose_provider_never_starts_lives_and_is_not_ready(self) -> None:
        self.config["providers"] = {"simulated": {"farm_command": ["/bin/false"]}}
        self.process = self.spawn()
        await self.until(lambda: "metrics are served" in self.log, "it serves", 60.0)
        self.assertEqual((await get(self.url + "healthz")).status, 200)
        answer = await get(self.url + "readyz")
        self.assertEqual(answer.status, 503)
        self.assertGreater(len(answer.body), 5)

    async def test_the_pool(self) -> None:
        self.config["pool"] = {"parallel": 2, "per_minute": 600}
        self.sizes = "\n[[pool.sizes]]\ncount = 2\n"
        await self.start()
        until = time.monotonic() + 60.0 * self.patience
        while await self.value("pool_vms", handler="", state="idle") < 2:
            self.assertLess(time.monotonic(), until, self.log[-3000:])
            await self.sleep(0.1)
        self.assertEqual(await self.value("pool_wanted_vms", handler=""), 2)
        await self.run_pod()
        claimed = {"provider": "simulated", "kind": "claimed"}
        self.assertEqual(await self.value("launches_total", outcome="ready", **claimed), 1)

    def written(self) -> str:
        return super().written() + getattr(self, "sizes", "")
