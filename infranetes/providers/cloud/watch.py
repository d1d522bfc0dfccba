"""Looking at the VMs now and then: for whoever waits for one, and for those that end by themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes.providers.cloud.calls import Calls
from infranetes.providers.cloud.interface import CloudError, Found, ICloud
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.translate import failed
from infranetes.providers.cloud.view import Known, View
from infranetes.providers.interface import Instance, InstanceState

_MISSED = 2  # lists in a row that have to lack a VM, before the cloud is asked for it by its id

_log = Logger()


class Watcher:
    """One list call serves all that wait, however many.

    :param instance: makes what watchers are told. :param end: begins to destroy a VM, saying why.
    """

    def __init__(
        self,
        reactor: Any,
        cloud: ICloud,
        settings: CloudSettings,
        calls: Calls,
        view: View,
        instance: Callable[[Found], Instance],
        end: Callable[[Found, str], None],
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._view = view
        self._instance = instance
        self._end = end
        self.watchers: list[Callable[[Instance], None]] = []
        self.destroying: set[str] = set()
        self.unwanted: dict[str, float] = {}  # tokens of failed launches, and until when
        self._changes: dict[str, list[Deferred[None]]] = {}
        self._waiting = 0
        self._sleep: Any = None
        self._wakes_at = 0.0
        self._stopped = False

    # ---- Waiting

    @contextmanager
    def waiting(self, id: str) -> Iterator[Callable[[], Awaitable[None]]]:
        """While somebody waits for a VM; what is yielded waits for its next change."""
        mine: list[Deferred[None]] = []

        async def changed() -> None:
            change: Deferred[None] = Deferred()
            mine.append(change)
            self._changes.setdefault(id, []).append(change)
            self._hurry()
            await change

        self._waiting += 1
        try:
            yield changed
        finally:
            self._waiting -= 1
            left = [one for one in self._changes.get(id, []) if one not in mine]
            if left:
                self._changes[id] = left
            else:
                self._changes.pop(id, None)

    def pause(self, seconds: float) -> Deferred[None]:
        """Some time."""
        return deferLater(self._reactor, seconds, lambda: None)

    # ---- Looking

    async def run(self) -> None:
        """Look, until stopped."""
        while not self._stopped:
            await self._rest()
            if not (self._waiting or self._view.live() or self.unwanted):
                continue
            try:
                await self.look()
            except CloudError as error:
                _log.debug("{error}", error=failed(self._cloud.place, error))
            except CancelledError:
                raise
            except Exception:
                _log.failure("{cloud}: looking at the VMs failed", cloud=self._cloud.place)

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True

    def _interval(self) -> float:
        return self._settings.poll_seconds if self._waiting else self._settings.watch_seconds

    async def _rest(self) -> None:
        seconds = self._interval()
        self._sleep = Deferred()
        self._wakes_at = self._reactor.seconds() + seconds
        timer = self._reactor.callLater(seconds, self._sleep.callback, None)
        try:
            await self._sleep
        finally:
            self._sleep = None
            if timer.active():
                timer.cancel()

    def _hurry(self) -> None:
        """Somebody waits now: look soon."""
        if self._sleep is not None and self._wakes_at - self._reactor.seconds() > self._settings.poll_seconds:
            sleep, self._sleep = self._sleep, None
            sleep.callback(None)

    async def look(self) -> None:
        """Ask for the list once, and see what is new in it."""
        founds = await self._calls.call("list VMs", self._cloud._thd_list, self._settings.watch_seconds + 30)
        self._view.merge(founds)
        shown = {one.id for one in founds}
        for known in list(self._view.live()):
            if known.found.id not in shown:
                await self._missed(known)
        self.notice()
        self._end_what_nobody_wants()

    def notice(self) -> None:
        """Wake those who wait for what is new, and tell of VMs that have ended."""
        while self._view.news:
            id = self._view.news.pop()
            known = self._view.vms.get(id)
            if known is not None and known.found.state is InstanceState.ENDED and not known.told:
                known.told = True
                self._tell(known.found)
            for change in self._changes.pop(id, []):
                if not change.called:
                    change.callback(None)

    async def _missed(self, known: Known) -> None:
        """A VM that has not ended, as far as we know, is not in the list."""
        if self._view.is_fresh(known) or known.found.id in self.destroying:
            return
        known.missed += 1
        if known.missed < _MISSED:
            return
        id = known.found.id
        found = await self._calls.call(
            f"look at VM {id}", partial(self._thd_get, id), self._settings.watch_seconds + 30
        )
        if found is not None:
            self._view.put(found)
        elif id in self._view.vms:
            self._view.lost(known, f"{self._cloud.place} no longer knows it")

    def _thd_get(self, id: str, driver: Any) -> Found | None:
        return self._cloud._thd_get(driver, id)

    def _tell(self, found: Found) -> None:
        if found.id in self.destroying or found.id in self._view.destroyed:
            return
        for watcher in self.watchers:
            try:
                watcher(self._instance(found))
            except Exception:
                _log.failure("a watcher failed on the end of VM {vm}", vm=found.id)

    def _end_what_nobody_wants(self) -> None:
        now = self._reactor.seconds()
        for token in [token for token, until in self.unwanted.items() if until < now]:
            del self.unwanted[token]
        ends = [(one, "it is its token's second VM") for one in self._view.twins()]
        ends += [
            (known.found, "its launch failed")
            for known in self._view.vms.values()
            if known.found.token in self.unwanted
        ]
        for found, why in ends:
            self._end(found, why)
