# SPDX-License-Identifier: Apache-2.0
"""The cluster's Services, as VMs and the node's own proxy are told of them."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.machines.interface import IAgent
from infranetes.services.timing import RuleProgress
from infranetes_common.concurrency import Event
from infranetes_common.wire import vmserver


class FakeSender:
    """What tells one VM of Services. :ivar told: happens once the VM has the rules; the test decides."""

    trouble = "nobody answers"

    def __init__(self) -> None:
        self.told: Event[None] = Event()
        self.started = self.stopped = 0

    @property
    def running(self) -> bool:
        return self.started > self.stopped

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def progress(self) -> RuleProgress:
        return RuleProgress(-1, None, self.trouble, None, None, None, 0)

    async def when_told(self) -> None:
        await self.told.wait()


class FakeServices:
    """The cluster's Services. :ivar senders: one for each VM that gets the rules."""

    def __init__(self) -> None:
        self.senders: list[FakeSender] = []

    def status(self) -> Mapping[str, object]:
        return {"rules": 7}

    def sender(self, agent: IAgent) -> FakeSender:
        self.senders.append(FakeSender())
        return self.senders[-1]


class FakeNodeServices:
    """The node's own service proxy."""

    def __init__(self) -> None:
        self.rules = FakeSender()

    async def service_report(
        self, key: vmserver.ServiceKey | None, seconds: float
    ) -> vmserver.ServiceReportResponse:
        return vmserver.ServiceReportResponse()
