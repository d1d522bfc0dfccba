# SPDX-License-Identifier: Apache-2.0
"""The node's memory that an idle pod takes, beyond what all pods share."""

from __future__ import annotations

from tests.e2e.pod_case import PodCase
from tests.support import process_memory
from tests.support.process_memory import Kind

PODS = 2
MOST = 150.0  # MiB that an idle pod may have written; about 85 are usual
MOST_OF = {Kind.GUEST: 60.0, Kind.CODE: 68.0}


class MemoryTests(PodCase):
    """Pods without a container, in real VMs."""

    async def test_an_idle_pod_has_little_that_is_its_own(self) -> None:
        await self.start()
        for number in range(PODS):
            await self.run_pod(f"pod-{number}")
        found = process_memory.of_vms(self.root / "state")
        self.assertEqual(len(found), PODS)
        for memory in found:
            written = {kind.value: round(each.written, 1) for kind, each in memory.items()}
            self.assertLess(process_memory.total(memory).written, MOST, written)
            for kind, most in MOST_OF.items():
                self.assertLess(memory[kind].written, most, written)
            shared = memory[Kind.GUEST]
            self.assertGreater(shared.shared, 20.0)  # the template's pages, as the guest is not a copy
