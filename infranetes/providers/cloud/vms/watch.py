# SPDX-License-Identifier: Apache-2.0
"""The polling of the list of VMs: for callers that wait for one, and to notice VMs that end on their own.

How long VMs have booted lately tells when it is worth looking at the next one:

who is waited for                                             the next list is after
nobody, or only VMs that can't run yet                        watch_seconds, or when one may run
a VM for as long as nine tenths of the shortest boot lately   poll_seconds
a VM, and no boot is known                                    poll_seconds
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Generic

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.translate import to_infranetes_error
from infranetes.providers.cloud.interface import Cloud, CloudError, CloudVM, D, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger, LedgerEntry
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import Notifier

_MAX_LISTS_MISSED = 2  # after so many, the cloud is asked for the VM by its id
_BOOTS = 10  # how many recent boots are remembered; the shortest counts
_SHARE = 0.9  # of the shortest boot: before that, no VM is expected to run

_log = Logger()


class Watcher(Generic[D]):
    """Polls with one list call, however many callers wait.

    :param to_instance: makes what watchers are called with.
    :param destroy: starts to destroy a VM; its second argument says why.
    :param takes_end: returns whether a VM's end is told by others.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        cloud: Cloud[D],
        settings: CloudSettings,
        calls: Calls[D],
        ledger: Ledger,
        to_instance: Callable[[CloudVM], Instance],
        destroy: Callable[[CloudVM, str], None],
        takes_end: Callable[[CloudVM], bool] = lambda vm: False,
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._ledger = ledger
        self._to_instance = to_instance
        self._destroy = destroy
        self._takes_end = takes_end
        self.watchers: list[Callable[[Instance], None]] = []
        self.destroying: set[str] = set()
        self.launching: set[str] = set()  # ids of VMs whose ends are reported by their launches
        # By the token of a failed launch: until when its VMs are unwanted.
        self.unwanted: dict[str, float] = {}
        self._changes: dict[str, Notifier] = {}  # by the VM's id
        self._waiting: list[str] = []  # ids of VMs, once for each caller that waits
        # By the id of a VM that does not run yet: when the first caller began to wait.
        self._since: dict[str, float] = {}
        self._boots: deque[float] = deque(maxlen=_BOOTS)  # seconds
        self._somebody_waits = Notifier()
        self._stopped = False

    # ---- Waiting

    @contextmanager
    def waiting(self, id: str) -> Iterator[Callable[[], Deferred[None]]]:
        """Poll more often in this block. What is yielded waits for the VM's next change."""

        def changed() -> Deferred[None]:
            change = self._changes.setdefault(id, Notifier()).wait()
            self._somebody_waits.notify()
            return change

        self._waiting.append(id)
        vm = self._ledger.last_said(id)
        if vm is None or vm.state is InstanceState.PENDING:
            self._since.setdefault(id, self._reactor.seconds())
        try:
            yield changed
        finally:
            self._waiting.remove(id)
            if id in self._changes and not self._changes[id].waiters:
                del self._changes[id]

    # ---- Polling

    async def run(self) -> None:
        """Poll until stopped."""
        while not self._stopped:
            await self._wait_for_next_poll()
            ledger = self._ledger
            if not (self._waiting or ledger.live() or ledger.ending or ledger.lasting or self.unwanted):
                continue
            try:
                await self.poll()
            except CloudError as error:
                _log.debug("{error}", error=to_infranetes_error(self._cloud.location, error))
            except CancelledError:
                raise
            except Exception:
                _log.failure("{cloud}: looking at the VMs failed", cloud=self._cloud.location)

    def stop(self) -> None:
        """Poll no more."""
        self._stopped = True

    async def _wait_for_next_poll(self) -> None:
        last = self._reactor.seconds()
        while (left := self._next_poll(last) - self._reactor.seconds()) > 0:
            with suppress(TimeoutError):
                await self._somebody_waits.wait().addTimeout(left, self._reactor)

    def _next_poll(self, last: float) -> float:
        """Return when to poll: see the table above. :param last: when the last one was."""
        expected = _SHARE * min(self._boots, default=0.0)
        due = min((self._since.get(id, 0.0) + expected for id in self._waiting), default=math.inf)
        return min(max(due, last + self._settings.poll_seconds), last + self._settings.watch_seconds)

    async def poll(self) -> None:
        """List the VMs once, and act on what changed."""
        deadline = self._settings.watch_seconds + 30
        vms = await self._calls.call("list VMs", self._cloud._thd_list, deadline)
        self._ledger.record_list(vms)
        listed = {vm.id for vm in vms}
        for entry in self._ledger.live():
            if entry.vm.id not in listed:
                await self._check_missing(entry, deadline)
        self.publish_changes()
        known = {*self._ledger.entries, *self._waiting}
        self._since = {id: since for id, since in self._since.items() if id in known}
        self._destroy_unwanted()

    def publish_changes(self) -> None:
        """Wake those who wait for VMs that changed, and report VMs that ended."""
        while self._ledger.changed:
            id = self._ledger.changed.pop()
            entry = self._ledger.entries.get(id)
            if entry is not None and entry.vm.state is InstanceState.ENDED and not entry.end_reported:
                entry.end_reported = True
                self._report_end(entry.vm)
            self._note_boot(id, entry)
            if id in self._changes:
                self._changes.pop(id).notify()

    def _note_boot(self, id: str, entry: LedgerEntry | None) -> None:
        """Note how long a VM has booted, if it has. :param entry: its; None: it is destroyed."""
        vm = entry.vm if entry is not None else None
        running = vm is not None and vm.state is InstanceState.RUNNING
        if vm is not None and (vm.state is InstanceState.PENDING or (running and not vm.private_address)):
            return
        since = self._since.pop(id, None)
        if since is not None and running:
            self._boots.append(self._reactor.seconds() - since)

    async def _check_missing(self, entry: LedgerEntry, deadline: float) -> None:
        """Ask for a live VM by its id if several lists in a row lacked it."""
        id = entry.vm.id
        if self._ledger.is_new(entry) or id in self.destroying:
            return
        entry.lists_missed += 1
        if entry.lists_missed < _MAX_LISTS_MISSED:
            return
        try:
            vm = await self._calls.call(f"look at VM {id}", partial(self._cloud._thd_get, id=id), deadline)
        except CloudError as error:
            if error.kind is not ErrorKind.STATE:
                raise
            return  # the cloud can't tell about this VM now, but can about others
        if vm is not None:
            self._ledger.record(vm)
        elif id in self._ledger.entries:
            self._ledger.record_end(entry, f"{self._cloud.location} no longer knows it")

    def _report_end(self, vm: CloudVM) -> None:
        if vm.id in self.destroying or vm.id in self.launching or vm.id in self._ledger.destroyed:
            return
        if self._takes_end(vm):
            return
        for watcher in self.watchers:
            try:
                watcher(self._to_instance(vm))
            except Exception:
                _log.failure("a watcher failed on the end of VM {vm}", vm=vm.id)

    def _destroy_unwanted(self) -> None:
        now = self._reactor.seconds()
        for token in [token for token, until in self.unwanted.items() if until < now]:
            del self.unwanted[token]
        unwanted = [(vm, "its token has another VM already") for vm in self._ledger.duplicates()]
        unwanted += [
            (entry.vm, "its launch failed")
            for entry in self._ledger.entries.values()
            if entry.vm.token in self.unwanted
        ]
        unwanted += [
            (self._ledger.entries[id].vm, "it was destroyed, and is still there")
            for id in self._ledger.lasting
            if id in self._ledger.entries
        ]
        for vm, why in unwanted:
            self._destroy(vm, why)
