# SPDX-License-Identifier: Apache-2.0
"""EBS snapshots like EC2's, on top of moto: with pending states, refusals and content.

moto's are complete at once, and have no content. Source of the refusals: EC2 API reference, "Error codes for
the Amazon EC2 API".
"""

from __future__ import annotations

from xml.etree import ElementTree

import attrs
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.reactors import IReactor
from tests.support.clouds.ec2_volumes import Answer, Call, Forward, parsed, path, text_of
from tests.support.clouds.ec2errors import error


@attrs.define
class Ec2Snapshots:
    """The calls about snapshots.

    :param forward: asks moto, and returns its answer with EC2's namespace.
    :ivar seconds: for how long a snapshot is pending. :ivar contents: of volumes and snapshots, by their ids.
    :ivar states: of snapshots that are not complete."""

    reactor: IReactor
    forward: Forward
    seconds: float = 0.05
    contents: dict[str, bytes] = attrs.field(factory=dict)
    states: dict[str, str] = attrs.field(factory=dict)
    _timers: list[IDelayedCall] = attrs.field(factory=list)

    def stop(self) -> None:
        """Make no more steps."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()

    def serves(self, action: str) -> bool:
        """Whether a call is about snapshots."""
        return action in ("CreateSnapshot", "DeleteSnapshot", "DescribeSnapshots")

    async def answer(self, call: Call) -> Answer:
        """Return EC2's answer."""
        status, body = await self.forward(call)
        if status == 200 and call["Action"] == "CreateSnapshot":
            id = text_of(parsed(body), "snapshotId")
            self.contents[id] = self.contents.get(call["VolumeId"], b"")
            self.states[id] = "pending"
            self._timers.append(self.reactor.callLater(self.seconds, self.states.pop, id, None))
        return status, self._shown(body) if status == 200 else body

    async def make_volume(self, call: Call, make: Forward) -> Answer:
        """Make a volume, from a snapshot if the call asks for it."""
        snapshot = call.get("SnapshotId", "")
        if snapshot in self.states:
            return 400, error("IncorrectState", f"Snapshot is in invalid state - {self.states[snapshot]}")
        answer = await make(call)
        if snapshot and answer[0] == 200:
            made = text_of(parsed(answer[1]), "volumeId")
            self.contents.setdefault(made, self.contents[snapshot])
        return answer

    def _shown(self, body: bytes) -> bytes:
        """Return an answer of moto's with the snapshots' real states."""
        answer = parsed(body)
        for snapshot in [answer, *answer.iterfind(path("snapshotSet/item"))]:
            state = self.states.get(text_of(snapshot, "snapshotId"))
            element = snapshot.find(path("status"))
            if state is not None and element is not None:
                element.text = state
        return ElementTree.tostring(answer)
