# SPDX-License-Identifier: Apache-2.0
"""How instances end at EC2: they shut down for a while, and may be terminated any number of times.

In moto they end at once, and a second TerminateInstances looks for the network interface that the first one
deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

State = tuple[int, str]
"""A state's code and name."""

RUNNING, TERMINATED, SHUTTING_DOWN = (16, "running"), (48, "terminated"), (32, "shutting-down")
STOPPING = (64, "stopping")
_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
_NO_INTERFACE = b"InvalidNetworkInterfaceID.NotFound"
_ITEM = re.compile(rb"<instanceId>(i-[0-9a-f]+)</instanceId>")
_REASON = re.compile(rb"<stateReason>.*?</stateReason>")
_NO_WORDS = re.compile(rb"<reason>.*?</reason>")  # but those of who asks for an end


class Ec2Endings:
    """The endings of one cloud's instances.

    :param now: seconds. :ivar seconds: for which instances shut down.
    :ivar reasons: codes and messages of instances that EC2 itself has ended, by their ids.
    """

    def __init__(self, now: Callable[[], float], seconds: float) -> None:
        self._now = now
        self.seconds = seconds
        self.reasons: dict[str, tuple[str, str]] = {}
        self._until: dict[str, float] = {}  # by the instance's id

    def answer(self, form: Mapping[str, str], answered: tuple[int, bytes]) -> tuple[int, bytes]:
        """Return EC2's answer to TerminateInstances, with each instance's state before it.

        :param answered: what moto answered."""
        status, body = answered
        ids = _ids(form)
        if status != 200 and _NO_INTERFACE not in body:
            return answered
        before = {id: self._state(id) if id in self._until else RUNNING for id in ids}
        for id in ids:
            self._until.setdefault(id, self._now() + (self.seconds if status == 200 else 0))
        return 200, _answer({id: (before[id], self._state(id)) for id in ids})

    def stopping(self, form: Mapping[str, str]) -> tuple[int, bytes]:
        """Return the answer to StopInstances."""
        return 200, _answer({id: (RUNNING, STOPPING) for id in _ids(form)}, "StopInstances")

    def ignored(self, form: Mapping[str, str]) -> tuple[int, bytes]:
        """Return the answer to a TerminateInstances that has no effect."""
        return 200, _answer({id: (RUNNING, SHUTTING_DOWN) for id in _ids(form)})

    def shown(self, part: bytes) -> bytes:
        """Return the part of a description that is about one instance as EC2 has it."""
        found = _ITEM.search(part)
        if found is not None and found[1].decode() in self.reasons:
            code, words = self.reasons[found[1].decode()]
            reason = f"<stateReason><code>{code}</code><message>{code}: {words}</message></stateReason>"
            return _NO_WORDS.sub(b"<reason/>", _REASON.sub(reason.encode(), part))
        if found is None or not self._is_shutting_down(found[1].decode()):
            return part
        return part.replace(_described(*TERMINATED), _described(*SHUTTING_DOWN))

    def _is_shutting_down(self, id: str) -> bool:
        return self._until.get(id, 0.0) > self._now()

    def _state(self, id: str) -> State:
        return SHUTTING_DOWN if self._is_shutting_down(id) else TERMINATED


def _ids(form: Mapping[str, str]) -> list[str]:
    return [value for name, value in form.items() if name.startswith("InstanceId.")]


def _answer(states: Mapping[str, tuple[State, State]], action: str = "TerminateInstances") -> bytes:
    """Return the answer to an action that ends instances. :param states: before and after it."""
    items = "".join(
        f"<item><instanceId>{id}</instanceId>{_of('previousState', before)}{_of('currentState', now)}</item>"
        for id, (before, now) in states.items()
    )
    return (
        f'<{action}Response xmlns="{_NAMESPACE}"><requestId>r</requestId>'
        f"<instancesSet>{items}</instancesSet></{action}Response>"
    ).encode()


def _of(name: str, state: State) -> str:
    code, words = state
    return f"<{name}><code>{code}</code><name>{words}</name></{name}>"


def _described(code: int, name: str) -> bytes:
    return _of("instanceState", (code, name)).encode()
