# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has each metric of the daemon, with its type, its labels and their values, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.machines.agent.container_watch import Reach
from infranetes.machines.pool_record import PoolState
from infranetes.monitoring.gauges import node_gauges
from infranetes.monitoring.metrics import Metrics
from infranetes.observer import CANCELLED, OK, Launch, LaunchKind, LaunchStep
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.cloud.calls.calls import HELD_BACK
from infranetes.providers.cloud.interface import Action, ErrorKind
from tests.infranetes.pods.fakes import FakeNode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_OF_THE_PROCESS = "process_"
_SUFFIXES = re.compile("_(bucket|sum|count|created|total)$")


@attrs.frozen
class Described:
    """A metric. :ivar kind: counter, histogram or gauge."""

    kind: str
    labels: frozenset[str]


def words(text: str) -> list[str]:
    """What is between backquotes."""
    return re.findall(r"`([^`]+)`", text)


def rows(columns: int) -> Iterator[list[str]]:
    """The rows of tables with so many columns."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == columns:
            yield cells


def told() -> Mapping[str, Described]:
    """The metrics of the page."""
    found = {}
    for metric, labels, what in rows(3):
        for name in words(metric):
            kind = "histogram" if what.startswith("histogram") else "gauge"
            found[name] = Described("counter" if name.endswith("_total") else kind, frozenset(words(labels)))
    return found


def of_events() -> Mapping[str, Described]:
    """Those that an observer makes."""
    metrics = Metrics()
    metrics.know("qemu")
    metrics.launched(Launch("1", "", "qemu", LaunchKind.NEW, 0.0, ((LaunchStep.BOOT, 1.0),)))
    metrics.answered("runtime.v1.RuntimeService", "Status", "OK", 0.01)
    metrics.provider_called("qemu", "launch", OK, 1.0)
    metrics.cloud_called("west", "launch", OK, 0.0, 1.0)
    metrics.cloud_retried("west", "launch", "throttled")
    found = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = Described(family.type, frozenset(labels))
    return found


class MetricTests(TestCase):
    def test_each_is_in_the_page_with_its_type_and_labels(self) -> None:
        world = FakeNode()
        self.addCleanup(world.kill)
        gauges = {each.name: Described("gauge", frozenset(each.labels)) for each in node_gauges(world.shown)}
        exist = {**of_events(), **gauges}
        page = told()
        for name in page:
            self.assertIn(name, exist)
        for name, described in exist.items():
            if not name.startswith(_OF_THE_PROCESS):
                self.assertEqual(page.get(name), described, name)


class ValueTests(SynchronousTestCase):
    """The words that labels have as values."""

    def setUp(self) -> None:
        self.values = {name: values for name, values in rows(2) if name.startswith("`")}
        self.metrics = {words(name)[0]: what for name, _, what in rows(3) if name.startswith("`")}

    def test_kinds_and_steps_of_launches(self) -> None:
        self.assertEqual(words(self.values["`kind`"]), [each.value for each in LaunchKind])
        self.assertEqual(words(self.values["`step`"]), [each.value for each in LaunchStep])

    def test_outcomes_of_requests_to_clouds(self) -> None:
        kinds = [each.name.lower() for each in ErrorKind]
        self.assertEqual(
            words(self.values["`outcome` and `reason` of clouds"]), [OK, *kinds, CANCELLED, HELD_BACK]
        )
        actions = words(self.metrics["infranetes_cloud_calls_total"])
        self.assertEqual(set(actions) - {"action"}, {each.name.lower() for each in Action})

    def test_states(self) -> None:
        for whose, states in (
            ("sandboxes", SandboxState),
            ("containers", ContainerState),
            ("the pool's VMs", PoolState),
        ):
            told = words(self.values[f"`state` of {whose}"])
            self.assertEqual(told, [each.value for each in states], whose)

    def test_how_far_agents_are(self) -> None:
        self.assertEqual(set(words(self.metrics["infranetes_agents"])), {each.value for each in Reach})
