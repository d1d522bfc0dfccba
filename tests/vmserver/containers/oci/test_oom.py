# SPDX-License-Identifier: Apache-2.0
"""Which processes the kernel kills first. crun takes a score of 0 for unset; conmon starts crun with 0."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import TestCase

from tests.harness.needs import needs_crun
from tests.vmserver.containers.oci.provider_case import OciCase

OWN = Path("/proc/self/oom_score_adj")


@needs_crun
class OomScoreTests(OciCase, TestCase):
    async def test_a_container_without_a_score_has_none_whatever_the_agent_has(self) -> None:
        self.addCleanup(OWN.write_text, OWN.read_text())
        OWN.write_text("300")
        container = await self.run_container("sleep", "600")
        pid = (await self.state(container)).pid
        self.assertEqual(Path(f"/proc/{pid}/oom_score_adj").read_text(), "0\n")
