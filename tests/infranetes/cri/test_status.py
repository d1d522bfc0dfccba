# SPDX-License-Identifier: Apache-2.0
"""The summary in Status."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

import twisted
from infranetes.cri.status import CLUSTER_CONDITION
from infranetes.ctl.render import as_json, as_text
from infranetes_common import __version__
from infranetes_common.wire import control, cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_services import FakeServices


class StatusTests(PodsTestCase):
    def info(self) -> dict[str, Any]:  # Any: JSON
        calls = self.world.status_calls
        answer = self.do(calls.Status(cri.StatusRequest(verbose=True), NO_CALL))
        return {key: json.loads(value) for key, value in answer.info.items()}

    def test_sandboxes_and_the_provider(self) -> None:
        self.run_pod()
        found = self.info()
        self.assertEqual(found["node"]["sandboxes"], {"ready": 1})
        self.assertEqual(found["provider"]["name"], self.world.provider.name)
        self.assertNotIn("services", found)

    def test_what_runs(self) -> None:
        self.assertEqual(
            self.info()["version"],
            {
                "infranetes": __version__,
                "twisted": twisted.__version__,
                "python": ".".join(str(each) for each in sys.version_info[:3]),
            },
        )

    def test_objects_of_kubernetes_that_can_t_be_followed(self) -> None:
        def condition() -> list[tuple[bool, str]]:
            found = self.do(self.world.status_calls.Status(cri.StatusRequest(), NO_CALL)).status.conditions
            return [(each.status, each.message) for each in found if each.type == CLUSTER_CONDITION]

        self.assertEqual(condition(), [])
        why = ["pods of Kubernetes can't be followed: 403"]
        self.world.cluster_troubles = lambda: why
        self.assertEqual(condition(), [(False, why[0])])
        service = self.world.control
        shown = self.do(service.ListPods(control.ListPodsRequest(), NO_CALL))
        self.assertEqual(list(shown.cluster_troubles), why)
        self.assertEqual(as_text("pods", shown, Namespace()).splitlines()[0], why[0])
        self.assertEqual(as_json("pods", shown, Namespace())["cluster_troubles"], why)
        why.clear()
        self.assertEqual(condition(), [(True, "")])

    def test_services_where_vms_are_told_of_them(self) -> None:
        self.world.services = self.world.node_provider.services = FakeServices()
        self.run_pod()
        self.assertEqual(self.info()["services"], {"rules": 7, "vms": 1, "current_vms": 0})
