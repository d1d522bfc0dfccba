# SPDX-License-Identifier: Apache-2.0
"""Prometheus' own promtool, about the metrics of a daemon, and about the alerts and queries in contrib/."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase

from tests.contrib.queries import RULES, RULES_TEST, panels
from tests.harness.needs import Need, Tier, needs
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.metrics import MetricsCase
from tests.infranetes.monitoring.client import get

_BUILT = ROOT / "build" / "tools" / "promtool"
PROMTOOL = str(_BUILT) if _BUILT.exists() else shutil.which("promtool")
INTERVAL = "$__rate_interval"  # Grafana's

_needs_promtool = needs(Need("promtool", "make promtool", Tier.NIGHTLY, lambda: PROMTOOL is not None))


def promtool(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    command = [PROMTOOL or "promtool", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


@_needs_promtool
class QueryTests(SynchronousTestCase):
    """What is in contrib/."""

    def assertPasses(self, done: subprocess.CompletedProcess[str]) -> None:
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_alerts_are_rules(self) -> None:
        self.assertPasses(promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES)))

    def test_they_fire_on_what_they_should_and_on_nothing_else(self) -> None:
        self.assertPasses(promtool("test", "rules", str(RULES_TEST)))

    def test_the_queries_of_the_dashboard_are_queries(self) -> None:
        queries = [query.replace(INTERVAL, "5m").replace("$instance", ".*") for _, query in panels()]
        rules = [
            {"record": f"dashboard:query:{number}", "expr": query} for number, query in enumerate(queries)
        ]
        path = Path(self.mktemp())
        path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
        self.assertPasses(promtool("check", "rules", str(path)))


@_needs_promtool
class MetricsTests(MetricsCase):
    """What a daemon exposes."""

    async def test_they_keep_to_prometheus_conventions(self) -> None:
        await self.start()
        await self.run_pod()
        text = (await get(self.url + "metrics")).body
        done = await deferToThread(promtool, "check", "metrics", stdin=text)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
