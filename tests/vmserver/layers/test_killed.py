# SPDX-License-Identifier: Apache-2.0
"""An agent may be killed at any step: the next one continues, and nothing is left behind."""

from __future__ import annotations

import os
import sys

from twisted.internet.utils import getProcessOutputAndValue

from tests.vmserver.layers.case import LayersTestCase, reactor


class KilledTests(LayersTestCase):
    timeout = 300

    async def killed(self, how: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        arguments = ["-m", "tests.vmserver.layers.killed", str(self.base / how), how]
        (self.base / how).mkdir()
        out, err, code = await getProcessOutputAndValue(
            sys.executable, arguments, environment, reactor=reactor
        )
        self.assertEqual(code, 0, (out + err).decode())
        self.assertGreater(int(out), 20)

    async def test_a_killed_agent_is_restarted(self) -> None:
        await self.killed("restart")

    async def test_the_vm_boots_after_its_agent_was_killed(self) -> None:
        await self.killed("boot")
