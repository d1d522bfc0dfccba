# SPDX-License-Identifier: Apache-2.0
"""CreateContainer answers before its caller's deadline."""

from __future__ import annotations

from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes.cri.containers import ContainerCalls
from infranetes.pods.containers.containers import Containers
from infranetes.pods.vm.listing import Listing
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from txgrpc import Call


class _Containers:
    """Records the time limits of creations."""

    def __init__(self) -> None:
        self.limits: list[float | None] = []

    async def create(self, sandbox_id: str, config: cri.ContainerConfig, limit: float | None) -> str:
        self.limits.append(limit)
        return "made"


class _Call:
    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining


class LimitTests(SynchronousTestCase):
    def limit(self, remaining: float | None) -> float | None:
        """Return the limit of a call that has so many seconds left."""
        containers: Any = _Containers()  # Any: only one method of Containers is called
        calls = ContainerCalls(cast(Listing, None), cast(Containers, containers))
        config = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name="main"), image=cri.ImageSpec(image="busybox")
        )
        request = cri.CreateContainerRequest(pod_sandbox_id="sandbox", config=config)
        work = start(calls.CreateContainer(request, cast(Call, _Call(remaining))))
        self.assertEqual(self.successResultOf(work).container_id, "made")
        [limit] = containers.limits
        return cast("float | None", limit)

    def test_a_second_before_it_and_a_twentieth_of_a_shorter_time(self) -> None:
        self.assertEqual([self.limit(seconds) for seconds in (120.0, 20.0, 2.0)], [119.0, 19.0, 1.9])

    def test_without_a_deadline_there_is_none(self) -> None:
        self.assertIsNone(self.limit(None))
