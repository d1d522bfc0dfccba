# SPDX-License-Identifier: Apache-2.0
"""Clones that take as long as a test wants: vcsim's take milliseconds.

While they are slow, a clone is answered with a task of ours, which runs until it is released or cancelled;
once released it stands for vcsim's own task.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

_TASK = re.compile(rb'<objectSet(?: [^>]*)?><obj type="Task">([^<]+)</obj>.*?</objectSet>')

Answer = tuple[int, bytes, list[tuple[str, str]]]


def _response(method: str, inner: str = "") -> str:
    return f'<{method}Response xmlns="urn:vim25">{inner}</{method}Response>'


class SlowClones:
    """:ivar on: whether clones from now on are slow until they are released.

    :param envelope: makes an answer from its body."""

    def __init__(self, envelope: Callable[[str], bytes]) -> None:
        self.on = False
        self._envelope = envelope
        self._held: dict[str, bytes] = {}
        self._cancelled: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._numbers = count()

    def early(self, action: str, body: bytes) -> Answer | None:
        """Return the answer, if it is only about clones that vcsim does not know."""
        if action == "CloneVM_Task" and self.on:
            return self.hold(body)[1]
        ours = self.unknown(body)
        if action == "CancelTask" and ours:
            for id in ours:
                self._held.pop(id, None)
                self._cancelled.add(id)
            return self._ok(_response(action))
        if ours and not _TASK.search(self.known(body, ours)):
            return self._ok(_response("RetrievePropertiesEx", f"<returnval>{self._tasks(ours)}</returnval>"))
        return None

    def unknown(self, body: bytes) -> list[str]:
        """Return the ids in a request that vcsim does not know."""
        return [id for id in [*self._held, *self._cancelled] if id.encode() in body]

    def hold(self, body: bytes) -> tuple[str, Answer]:
        """Begin a slow clone. Returns the id of its task, and the answer."""
        id = f"slow-{next(self._numbers)}-"
        self._held[id] = body
        return id, self._ok(_response("CloneVM_Task", f'<returnval type="Task">{id}</returnval>'))

    def _ok(self, body: str) -> Answer:
        return 200, self._envelope(body), []

    def _tasks(self, ids: Sequence[str]) -> str:
        return "".join(self._task(id) for id in ids)

    def _task(self, id: str) -> str:
        state = "error" if id in self._cancelled else "running"
        values = f'<propSet><name>info.state</name><val xsi:type="TaskInfoState">{state}</val></propSet>'
        if id in self._cancelled:
            fault = '<fault xsi:type="RequestCanceled"/><localizedMessage>cancelled</localizedMessage>'
            value = f'<val xsi:type="LocalizedMethodFault">{fault}</val>'
            values += f"<propSet><name>info.error</name>{value}</propSet>"
        return f'<objects><obj type="Task">{id}</obj>{values}</objects>'

    async def release(self, clone: Callable[[bytes], Awaitable[str]]) -> None:
        """Make the clones now. :param clone: lets vcsim make one and returns its task."""
        self.on = False
        for id in list(self._held):
            await self.make(id, clone)

    async def make(self, id: str, clone: Callable[[bytes], Awaitable[str]]) -> None:
        """Make one clone now, unless it was cancelled. :param clone: as in `release`."""
        body = self._held.get(id)
        if body is not None:
            self._aliases[id] = await clone(body)
            self._held.pop(id, None)

    def known(self, body: bytes, unknown: Sequence[str]) -> bytes:
        """Return a request with vcsim's task ids, without the clones that it does not know."""
        for alias, real in self._aliases.items():
            body = body.replace(alias.encode(), real.encode())
        ours = {id.encode() for id in unknown}
        return _TASK.sub(lambda each: b"" if each[1] in ours else each[0], body) if ours else body

    def told(self, body: bytes, unknown: Sequence[str]) -> bytes:
        """Return an answer with our task ids, and with the clones that vcsim was not asked for."""
        for alias, real in self._aliases.items():
            body = body.replace(f">{real}<".encode(), f">{alias}<".encode())
        return body.replace(b"<returnval>", f"<returnval>{self._tasks(unknown)}".encode(), 1)
