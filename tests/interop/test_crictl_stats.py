# SPDX-License-Identifier: Apache-2.0
"""crictl's stats, statsp, metricsp, metricdescs, imagefsinfo and events."""

from __future__ import annotations

import json
import time
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol

from tests.harness.needs import needs_tools
from tests.interop.test_crictl import CRICTL, CrictlCase

reactor: Any = the_reactor
CLEAR = "\x1b[2J\x1b[H"  # the screen


class Output(ProcessProtocol):
    """Collects what a process says, for as long as it goes on."""

    def __init__(self) -> None:
        self.out = b""
        self.ended: Deferred[None] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self.out += data

    def processEnded(self, reason: Any) -> None:
        self.ended.callback(None)


@needs_tools("crictl")
class StatsTests(CrictlCase):
    """Figures as people look at them."""

    async def setUp(self) -> None:
        super().setUp()
        await self.start()
        self.sandbox = await self.run_pod()
        self.container = await self.run_container(self.sandbox, self.box("busy", "while :; do :; done"))

    async def rows(self, *words: str) -> list[list[str]]:
        """A table's lines. crictl takes two samples; on a busy machine the pod may be late for one."""
        until = time.monotonic() + 60.0
        while True:
            shown = (await self.crictl(*words)).replace(CLEAR, "")
            rows = [line.split() for line in shown.splitlines()]
            if len(rows) > 1 or time.monotonic() > until:
                return rows

    async def test_figures_and_metrics(self) -> None:
        head, row = await self.rows("stats")
        self.assertEqual(head[:4], ["CONTAINER", "NAME", "CPU", "%"])
        self.assertEqual((row[0], row[1]), (self.container[:13], "busy"))
        self.assertGreater(float(row[2]), 1.0)
        self.assertRegex(row[3], r"^[0-9.]+[kM]B$")
        head, row = await self.rows("statsp")
        self.assertEqual(head[:2], ["POD", "POD"])
        self.assertEqual((row[0], row[1]), ("web", self.sandbox[:13]))
        self.assertGreater(float(row[2]), 1.0)
        stats = (await self.json("stats", self.container))["stats"]
        self.assertEqual([one["attributes"]["id"] for one in stats], [self.container])
        self.assertIn("usageNanoCores", stats[0]["cpu"])
        self.assertIn("workingSetBytes", stats[0]["memory"])
        described = {one["name"]: one for one in (await self.json("metricdescs"))["descriptors"]}
        (pod,) = (await self.json("metricsp"))["podMetrics"]
        self.assertEqual(pod["podSandboxId"], self.sandbox)
        (container,) = pod["containerMetrics"]
        names = {one["name"] for one in (*pod["metrics"], *container["metrics"])}
        self.assertLessEqual(names, set(described))
        self.assertIn("container_memory_working_set_bytes", names)
        status = (await self.json("imagefsinfo"))["status"]
        (images,) = status["imageFilesystems"]
        self.assertGreater(int(images["usedBytes"]["value"]), 100_000)
        self.assertEqual(status["containerFilesystems"], [images])

    async def test_events_are_shown_as_they_happen(self) -> None:
        output = Output()
        command = [str(CRICTL), "--config", str(self.root / "crictl.yaml"), "events"]
        process = reactor.spawnProcess(output, command[0], command, env={})
        try:
            # Nothing says that crictl listens already: something happens until it has been told of it.
            until = time.monotonic() + 60.0
            number = 0
            while b"CONTAINER_CREATED_EVENT" not in output.out:
                self.assertLess(time.monotonic(), until, output.out)
                container = await self.create(self.sandbox, self.box(f"c{number}"))
                number += 1
                await self.sleep(0.2)
            await self.until(lambda: container.encode() in output.out, "the last one is told")
        finally:
            process.signalProcess("INT")
            await output.ended
        event, _ = json.JSONDecoder().raw_decode(output.out.decode())
        self.assertEqual(event["podSandboxStatus"]["id"], self.sandbox)
