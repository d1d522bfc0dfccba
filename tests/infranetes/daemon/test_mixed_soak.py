# SPDX-License-Identifier: Apache-2.0
"""A soak test of a node with both kinds of pods: the daemon and containerd are killed at random moments."""

from __future__ import annotations

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.harness.days import today
from tests.harness.needs import needs_root, nightly
from tests.support import mixed_soak

SECONDS = 5.0  # plus the time for pods that run then; `python -m bench lives:mixed` runs 200 pods
WIDTH = 3
LIMIT = 500.0  # seconds, on a busy machine


@needs_root
@nightly
class MixedSoakTests(TestCase):
    timeout = 600

    async def test_no_pod_of_either_is_lost_and_nothing_leaks(self) -> None:
        found = await deferToThread(mixed_soak.run, 1000, WIDTH, SECONDS, LIMIT, today())
        self.assertEqual(found["lost"], [], found["log"])
        self.assertEqual(found["leaked"], [], found["log"])
        self.assertEqual(found["lasted"], len(mixed_soak.HANDLERS), "pods that ran all the time")
        self.assertGreaterEqual(found["pods"], WIDTH)
        self.assertGreater(found["kills"] + found["containerd_kills"], 0)
