# SPDX-License-Identifier: Apache-2.0
"""How instances end at EC2: they shut down for a while, and may be terminated any number of times.

At moto they have ended at once, and a second TerminateInstances looks for the network interface that the
first one deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

TERMINATED, SHUTTING_DOWN = (48, "terminated"), (32, "shutting-down")
_NO_INTERFACE = b"InvalidNetworkInterfaceID.NotFound"
_ITEM = re.compile(rb"<instanceId>(i-[0-9a-f]+)</instanceId>")


class Ec2Endings:
    """The endings of one cloud's instances.

    :param now: seconds. :ivar seconds: for which instances shut down.
    """

    def __init__(self, now: Callable[[], float], seconds: float) -> None:
        self._now = now
        self.seconds = seconds
        self._until: dict[str, float] = {}  # by the instance's id

    def answer(self, form: Mapping[str, str], answered: tuple[int, bytes]) -> tuple[int, bytes]:
        """Return EC2's answer to TerminateInstances. :param answered: what moto answered."""
        status, body = answered
        ids = [value for name, value in form.items() if name.startswith("InstanceId.")]
        if status != 200 and _NO_INTERFACE not in body:
            return answered
        for id in ids:
            self._until.setdefault(id, self._now() + (self.seconds if status == 200 else 0))
        items = "".join(
            f"<item><instanceId>{id}</instanceId><currentState>{self._state(id)}</currentState></item>"
            for id in ids
        )
        namespace = "http://ec2.amazonaws.com/doc/2016-11-15/"
        return 200, (
            f'<TerminateInstancesResponse xmlns="{namespace}"><instancesSet>{items}</instancesSet>'
            "</TerminateInstancesResponse>"
        ).encode()

    def shown(self, part: bytes) -> bytes:
        """Return the part of a description that is about one instance as EC2 has it."""
        found = _ITEM.search(part)
        if found is None or not self._is_shutting_down(found[1].decode()):
            return part
        return part.replace(_described(*TERMINATED), _described(*SHUTTING_DOWN))

    def _is_shutting_down(self, id: str) -> bool:
        return self._until.get(id, 0.0) > self._now()

    def _state(self, id: str) -> str:
        code, name = SHUTTING_DOWN if self._is_shutting_down(id) else TERMINATED
        return f"<code>{code}</code><name>{name}</name>"


def _described(code: int, name: str) -> bytes:
    return f"<instanceState><code>{code}</code><name>{name}</name></instanceState>".encode()
