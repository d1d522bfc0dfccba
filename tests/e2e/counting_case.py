# SPDX-License-Identifier: Apache-2.0
"""Pods that count, by which one sees whether they go on where they were."""

from __future__ import annotations

import time

from tests.e2e.pod_case import PodCase

#: A script that counts in memory, ten times a second, and tells in a file on the disk.
COUNTER = "n=0; while :; do n=$((n+1)); echo $n > /count; sleep 0.1; done"
_SECONDS = 60.0


class CountingCase(PodCase):
    """Pods whose containers run `COUNTER`."""

    async def count(self, container: str) -> int:
        """Return how far a container has counted."""
        while not (said := (await self.execute(container, "cat", "/count")).stdout):
            pass  # it is being written
        return int(said)

    async def goes_on(self, container: str, reached: int | None = None) -> None:
        """Wait until a container has counted further. :param reached: than this; None: than now."""
        if reached is None:
            reached = await self.count(container)
        until = time.monotonic() + _SECONDS
        while (now := await self.count(container)) <= reached:
            self.assertLess(time.monotonic(), until, f"it stands at {now}")
