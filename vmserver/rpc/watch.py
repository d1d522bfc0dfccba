# SPDX-License-Identifier: Apache-2.0
"""Watch: the current state of the pod's containers, then every change, and a notice of the machine's end."""

from __future__ import annotations

from collections.abc import AsyncIterator

from infranetes_common.concurrency import Notifier
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentWatchRpcs
from txgrpc import Call
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.interruptions import Interruption
from vmserver.rpc import bounds

# The order of states: a container only moves to a higher one.
_RANK = {
    cri.CONTAINER_CREATED: 1,
    cri.CONTAINER_RUNNING: 2,
    cri.CONTAINER_EXITED: 3,
}
_MACHINE = ""  # never a container's id


class Watcher:
    """The events that one Watch call has not sent yet: the latest of each container, so its size is bounded.

    A slow client misses intermediate states, never the latest one.
    """

    def __init__(self) -> None:
        self._events: dict[str, messages.WatchEvent] = {}  # by container id, in order of first change
        self._notifier = Notifier()

    def changed(self, state: messages.ContainerState) -> None:
        """Note a container's new state."""
        self._put(state.id, messages.WatchEvent(container=bounds.state(state)))

    def removed(self, id: str) -> None:
        """Note that a container is gone."""
        self._put(id, messages.WatchEvent(removed=id))

    def interrupted(self, interruption: messages.Interruption) -> None:
        """Note that the machine will be taken away."""
        self._put(_MACHINE, messages.WatchEvent(interruption=interruption))

    def take(self) -> dict[str, messages.WatchEvent]:
        """Return the events since the last call, by container id; `_MACHINE` for the machine itself."""
        taken, self._events = self._events, {}
        return taken

    async def wait(self) -> None:
        """Return once there is an event."""
        while not self._events:
            await self._notifier.wait()

    def _put(self, id: str, event: messages.WatchEvent) -> None:
        self._events[id] = event
        self._notifier.notify()


class WatchCalls(AgentWatchRpcs):
    """Passes the provider's reports to every Watch call.

    :ivar watchers: one for each call that is open.
    """

    def __init__(self, choice: ProviderChoice) -> None:
        self._choice = choice
        self.watchers: set[Watcher] = set()
        self._interruption: messages.Interruption | None = None
        choice.watch(self._changed, self._removed)

    def _changed(self, state: messages.ContainerState) -> None:
        for watcher in self.watchers:
            watcher.changed(state)

    def _removed(self, id: str) -> None:
        for watcher in self.watchers:
            watcher.removed(id)

    def interrupted(self, interruption: Interruption) -> None:
        """Tell every Watch call, also later ones, that the machine will be taken away."""
        self._interruption = messages.Interruption(
            at_nanos=int(interruption.at * 1e9), reason=interruption.reason
        )
        for watcher in self.watchers:
            watcher.interrupted(self._interruption)

    async def Watch(self, request: messages.WatchRequest, call: Call) -> AsyncIterator[messages.WatchEvent]:
        watcher = Watcher()
        self.watchers.add(watcher)
        try:
            snapshot = {state.id: state for state in await self._choice.provider.containers()}
            # A change made while the list was being read is in the list, in the events, or in both.
            for id, event in watcher.take().items():
                if event.HasField("removed"):
                    snapshot.pop(id, None)
                elif event.HasField("container") and (
                    id not in snapshot or _rank(event.container) >= _rank(snapshot[id])
                ):
                    snapshot[id] = event.container
            for state in snapshot.values():
                yield messages.WatchEvent(container=bounds.state(state))
            yield messages.WatchEvent(synced=messages.Synced())
            if self._interruption is not None:
                watcher.interrupted(self._interruption)
            while True:
                await watcher.wait()
                for event in watcher.take().values():
                    yield event
        finally:
            self.watchers.discard(watcher)


def _rank(state: messages.ContainerState) -> int:
    return _RANK.get(state.state, 0)
