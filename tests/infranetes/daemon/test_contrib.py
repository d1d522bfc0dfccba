# SPDX-License-Identifier: Apache-2.0
"""The alerts and the dashboard in contrib/ query only what a daemon exposes."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.metrics import Metrics
from infranetes.observer import OK
from infranetes.providers.cloud.calls.calls import HELD_BACK
from infranetes.providers.cloud.interface import Action, ErrorKind
from infranetes_simulation.provider.settings import BEHAVIOUR_ANNOTATION, FAILS
from tests.contrib.queries import OF_THE_TARGET, alerts, dashboard, panels, uses
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.metrics import MetricsCase
from txgrpc import GrpcError

OF_NO_METRIC = {"cancelled"}  # a reason that no pod of this test has

Labels = dict[str, dict[str, set[str]]]
"""By metric and label the values that it was seen with."""


class DashboardTests(SynchronousTestCase):
    """The dashboard's JSON."""

    def test_panels_have_ids_of_their_own_and_do_not_overlap(self) -> None:
        found = dashboard()["panels"]
        self.assertEqual(len({panel["id"] for panel in found}), len(found))
        taken: set[tuple[int, int]] = set()
        for panel in found:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            self.assertEqual(cells & taken, set(), panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24, panel["title"])
            taken |= cells


@needs_registry
class ContribTests(MetricsCase):
    """Every metric and label in a query is exposed by a daemon some of whose pods ran and some failed."""

    def of_clouds(self) -> str:
        """Return what a daemon on a cloud exposes, since these VMs are not on a cloud."""
        metrics = Metrics()
        for action in Action:
            for outcome in (OK, HELD_BACK, *(kind.name.lower() for kind in ErrorKind)):
                metrics.cloud_called("west", action.name.lower(), outcome, 0.0, 0.1)
                metrics.cloud_retried("west", action.name.lower(), outcome)
        lines = generate_latest(metrics.registry).decode().splitlines(keepends=True)
        return "".join(line for line in lines if "infranetes_cloud_" in line)

    async def exposed(self) -> Labels:
        await self.start()
        await self.run_container(await self.run_pod(), self.box(script="sleep 600"))
        failing = self.pod("bad", annotations={BEHAVIOUR_ANNOTATION: FAILS})
        with self.assertRaises(GrpcError):
            await self.run_pod("bad", failing)
        found: Labels = {}
        families = [*await self.families(), *text_string_to_metric_families(self.of_clouds())]
        for sample in (sample for family in families for sample in family.samples):
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        return found

    async def test_each_metric_label_and_value_of_a_query_exists(self) -> None:
        exposed = await self.exposed()
        queries = [*alerts(), *panels()]
        self.assertGreater(len(queries), 30)
        for use in (use for where, query in queries for use in uses(where, query)):
            self.assertIn(use.metric, exposed, use.where)
            labels = exposed[use.metric]
            for label, values in use.values.items():
                if label in OF_THE_TARGET:
                    continue
                self.assertIn(label, labels, use)
                self.assertLessEqual(values - OF_NO_METRIC, labels[label], use)
            self.assertLessEqual(use.grouped, labels.keys(), use)
