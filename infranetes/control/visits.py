# SPDX-License-Identifier: Apache-2.0
"""Visits to pods' VMs, by a shell or by their screens: who may, and who came for how long.

The log has who came and when it was over, but never what was typed and shown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import attrs
from twisted.internet.defer import TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.node.inventory import Sandbox
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    InfranetesError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import control
from txgrpc import Call
from txgrpc.peers import PeerCredentials

KEY = "control.enter"
START_SECONDS = 30.0  # within which the first message has to come
_NOBODY = 2**32 - 1  # a login uid that is not set

RequestT = TypeVar("RequestT")


@attrs.frozen
class Visitor:
    """The caller. :ivar login: the uid that logged in, though it is another one by now; None: not known."""

    uid: int | None
    pid: int | None
    login: int | None


@attrs.frozen
class Words:
    """How one kind of visit is spoken of. Formats are of `Logger`."""

    log: Logger
    refused: str
    opened: str
    ended: str
    may_not: str  # whom the configuration refuses, as the beginning of a sentence
    too_many: str  # what to do where as many are open as may be
    stopping: str  # what to do once the daemon has stopped


@attrs.define(eq=False)
class Visit:
    """A visit that is under way.

    :ivar why: why it has ended, for the log. :ivar error: why it is ended here.
    """

    _cancel: Callable[[], None]
    why: str = "the caller went away"
    exit_code: int | None = None
    error: InfranetesError | None = None

    def end(self, error: InfranetesError) -> None:
        """End it with this error. The first one counts."""
        self.error = self.error or error
        self._cancel()


class Visits:
    """All visits of one kind.

    :param allowed: whether the configuration allows them now. :param most: how many there may be at a time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        allowed: Callable[[], bool],
        most: int,
        words: Words,
    ) -> None:
        self._clock = clock
        self._allowed = allowed
        self._most = most
        self._words = words
        self._open: set[Visit] = set()

    def admit(self, call: Call) -> Visitor:
        """Return who calls. :raise PermissionDenied: nobody may."""
        visitor = _visitor(call.peer_credentials)
        if not self._allowed():
            self._words.log.warn(self._words.refused, key=KEY, **attrs.asdict(visitor))
            raise PermissionDenied(
                f"{self._words.may_not}: set {KEY} = true in its configuration, and reload it (systemctl "
                "reload infranetes)"
            )
        return visitor

    async def first(self, requests: AsyncIterator[RequestT]) -> RequestT | None:
        """Return the first message; None: there is none. :raise DeadlineExceeded: it does not come."""
        coming = start(_next(requests))
        try:
            return await coming.addTimeout(START_SECONDS, self._clock)
        except TimeoutError:
            raise DeadlineExceeded(f"no first message within {START_SECONDS:g} s") from None

    def check_room(self) -> None:
        """Check that there may be one more. :raise ResourceExhausted: there are as many as may be."""
        if len(self._open) >= self._most:
            raise ResourceExhausted(self._words.too_many.format(most=self._most))

    @contextmanager
    def opened(self, sandbox: Sandbox, visitor: Visitor, cancel: Callable[[], None]) -> Iterator[Visit]:
        """Note a visit, from its beginning to its end. :param cancel: ends it."""
        words, visit, began = self._words, Visit(cancel), self._clock.seconds()
        about = {
            "vm": sandbox.record.instance_id,
            "sandbox": sandbox.id,
            "pod": sandbox.pod,
            **attrs.asdict(visitor),
        }
        words.log.warn(words.opened, **about)
        self._open.add(visit)
        try:
            yield visit
        finally:
            self._open.discard(visit)
            seconds = round(self._clock.seconds() - began, 1)
            words.log.warn(words.ended, seconds=seconds, exit_code=visit.exit_code, why=visit.why, **about)

    def stop(self) -> None:
        """End all visits, because the daemon stops."""
        for visit in list(self._open):
            visit.end(Unavailable(f"the daemon is stopping: {self._words.stopping}"))


def vm_of(sandbox: Sandbox) -> control.VmOfPod:
    """Return which VM was meant."""
    metadata = sandbox.config.metadata
    return control.VmOfPod(
        sandbox_id=sandbox.id,
        namespace=metadata.namespace,
        name=metadata.name,
        vm_id=sandbox.record.instance_id,
    )


def _visitor(peer: PeerCredentials | None) -> Visitor:
    if peer is None:
        return Visitor(None, None, None)
    login = None
    with suppress(OSError, ValueError):
        login = int(Path(f"/proc/{peer.pid}/loginuid").read_text())
    return Visitor(peer.uid, peer.pid, None if login == _NOBODY else login)


async def _next(requests: AsyncIterator[RequestT]) -> RequestT | None:
    return await anext(aiter(requests), None)
