# SPDX-License-Identifier: Apache-2.0
"""The summary in Status."""

from __future__ import annotations

import json
import sys
from typing import Any

import twisted
from infranetes.cri.status import StatusCalls
from infranetes_common import __version__
from infranetes_common.wire import cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeServices


class StatusTests(PodsTestCase):
    def info(self) -> dict[str, Any]:  # Any: JSON
        calls = StatusCalls(self.world.node, (), "systemd")
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

    def test_services_where_vms_are_told_of_them(self) -> None:
        self.world.services = self.world.node.services = FakeServices()
        self.run_pod()
        self.assertEqual(self.info()["services"], {"rules": 7, "vms": 1, "current_vms": 0})
