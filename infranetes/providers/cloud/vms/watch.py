# SPDX-License-Identifier: Apache-2.0
"""Looks at VMs: for callers that wait for one, and to notice VMs that end on their own.

How long VMs have booted lately tells when it is worth looking at the next one:

what is known                                                 the next look is after
nothing is expected                                           watch_seconds: the daemon's sweep lists
a VM boots                                                    doubt_seconds
it boots for nine tenths of the shortest boot lately          poll_seconds, and more the longer it boots
it boots, and no boot is known                                the same
a VM's agent is silent                                        a few seconds, then longer: see `pace`
a VM has no agent, or a failed launch's VM may turn up        doubt_seconds

A look is a list of all VMs, unless so few are to be looked at that asking for each by its id costs less of
the cloud's quotas (`Cloud.looks_per_list`). Refusals of the cloud's stretch all pauses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Generic

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger, LogLevel

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.passes import one_pass
from infranetes.providers.cloud.interface import Cloud, CloudError, CloudVM, D, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger, LedgerEntry
from infranetes.providers.cloud.vms.pace import Doubts, Stretch
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import Notifier

_MAX_LISTS_MISSED = 2  # after so many, the cloud is asked for the VM by its id
_BOOTS = 10  # how many recent boots are remembered; the shortest counts
_SHARE = 0.9  # of the shortest boot: before that, no VM is expected to run
_LAPSE = 1.5  # times `watch_seconds`: after so long without the sweep's list there is one of the watcher's
# Seconds for which a look is tried again: where the cloud serves fewer than are asked for, it is better made
# later.
_INSISTENCE = 5.0
# Looks become rarer the longer a VM boots. The pause between lists is this share of the time since it was
# launched; between looks at a single VM, which clouds limit too, of the time since it may run.
_PATIENCE, _PATIENCE_WITH_ONE, _LONGEST_PAUSE = 0.04, 0.1, 5.0

_log = Logger()


class Watcher(Generic[D]):
    """Looks with one list call, however many callers wait.

    :param to_instance: makes what watchers are called with.
    :param destroy: starts to destroy a VM; its second argument says why.
    :param takes_end: returns whether a VM's end is told by others.
    :param is_agentless: returns whether a VM has no agent, whose silence would tell of its end.
    :ivar doubts: VMs whose agents are silent. :ivar stretch: of all pauses.
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
        is_agentless: Callable[[CloudVM], bool] = lambda vm: False,
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._ledger = ledger
        self._to_instance = to_instance
        self._destroy = destroy
        self._takes_end = takes_end
        self._is_agentless = is_agentless
        self.doubts = Doubts(reactor.seconds, settings.doubt_seconds)
        self.stretch = Stretch()
        self._silent: set[str] = set()  # ids of VMs whose agents are silent, and that no list has shown yet
        self._listed_at = self._looked_at = reactor.seconds()
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
        """Look more often in this block. What is yielded waits for the VM's next change."""

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

    # ---- Looking

    def hear(self, id: str, heard: bool) -> None:
        """Note whether a VM's agent is heard. One that falls silent may be the end of its VM."""
        if heard:
            self._silent.discard(id)
            self.doubts.dismiss(id)
        elif id not in self._ledger.entries:
            self._silent.add(id)
        else:
            self._doubt(id)

    def _doubt(self, id: str) -> None:
        vm = self._ledger.last_said(id)
        if vm is not None and vm.state is not InstanceState.ENDED:
            self.doubts.raise_for(id)
            self._somebody_waits.notify()

    async def run(self) -> None:
        """Look until stopped."""
        while not self._stopped:
            await self._wait_for_next_look()
            self._forget_others()
            ledger = self._ledger
            if not (self._waiting or ledger.live() or ledger.ending or ledger.lasting or self.unwanted):
                self._listed_at = self._reactor.seconds()
                continue
            with one_pass(self._cloud.location, "looking at the VMs", LogLevel.debug):
                await self._look()

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True

    async def _wait_for_next_look(self) -> None:
        while (left := self._next_look() - self._reactor.seconds()) > 0:
            with suppress(TimeoutError):
                # What is to be looked at may change meanwhile.
                pause = min(left, self._settings.doubt_seconds)
                await self._somebody_waits.wait().addTimeout(pause, self._reactor)

    def _next_look(self) -> float:
        """Return when to look: see the table above."""
        due = min(self._next_list(), self._next_of_booting(), self.doubts.next)
        return max(due, self._looked_at + self._settings.poll_seconds)

    def _next_list(self) -> float:
        """Return when a list is due, whatever is known of single VMs."""
        seconds = self._settings.watch_seconds * _LAPSE
        if self.unwanted or any(self._is_agentless(entry.vm) for entry in self._ledger.live()):
            seconds = min(seconds, self._settings.doubt_seconds)
        return self._listed_at + seconds * self.stretch.factor

    def _next_of_booting(self) -> float:
        """Return when VMs that are waited for are due; infinity: there are none."""
        if not self._waiting:
            return math.inf
        may_run = [self._may_run_at(id) for id in self._waiting]
        due = min(may_run)
        if len(set(self._waiting)) <= self._cloud.looks_per_list:
            pause = (self._looked_at - due) * _PATIENCE_WITH_ONE
        else:
            pause = (self._looked_at - max(self._since.get(id, 0.0) for id in self._waiting)) * _PATIENCE
        pause = max(self._settings.poll_seconds, min(pause, _LONGEST_PAUSE))
        waited_since = min(self._since.get(id, 0.0) for id in self._waiting)
        # It may be faster than the others.
        unexpected = max(self._looked_at, waited_since) + self._settings.doubt_seconds
        return max(min(due, unexpected), self._looked_at + pause * self.stretch.factor)

    def _may_run_at(self, id: str) -> float:
        return self._since.get(id, 0.0) + _SHARE * min(self._boots, default=0.0)

    async def _look(self) -> None:
        """List the VMs, or look at those that are due one by one, and act on what changed."""
        now = self._reactor.seconds()
        doubtful = self.doubts.due()
        booting = {id for id in self._waiting if self._may_run_at(id) <= now}
        if not booting and now >= self._next_of_booting():
            booting.update(self._waiting)
        due = booting.union(doubtful)
        if not due and now < self._next_list():
            return
        try:
            if not due or len(due) > self._cloud.looks_per_list or now >= self._next_list():
                await self.poll()
                return
            with self._counted():
                for id in due:
                    await self._look_at(id)
        finally:
            self.doubts.looked(doubtful, self.stretch.factor)
        self.publish_changes()

    async def poll(self) -> None:
        """List the VMs once, and act on what changed."""
        listed = await self._listed(self._cloud._thd_list, _INSISTENCE)
        self._record(listed)
        await self.settle({vm.id for vm in listed})

    async def list_all(self) -> tuple[list[CloudVM], set[str]]:
        """List the VMs once, at the least cost. Return those that exist, and the ids of those listed, which
        are to be given to `settle`."""
        listed = await self._listed(self._cloud._thd_survey)
        vms = self._record(listed)
        self.publish_changes()
        return vms, {vm.id for vm in listed}

    async def _listed(
        self, work: Callable[[D], list[CloudVM]], seconds: float | None = None
    ) -> list[CloudVM]:
        with self._counted():
            self._listed_at = self._reactor.seconds()
            listed = await self._calls.call("list VMs", work, seconds)
            self._listed_at = self._reactor.seconds()
        return listed

    def _record(self, listed: list[CloudVM]) -> list[CloudVM]:
        """Record a list. Return the VMs that exist."""
        vms = self._ledger.record_list(listed)
        silent, self._silent = self._silent, set()
        for id in silent:
            self._doubt(id)
        return vms

    async def settle(self, listed: set[str]) -> None:
        """Look for live VMs that a list lacked, and destroy those that are unwanted."""
        for entry in self._ledger.live():
            if entry.vm.id not in listed:
                await self._check_missing(entry)
        self.publish_changes()
        self._forget_others()
        self._destroy_unwanted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Take note of a look, and of how often the cloud refused it."""
        self._looked_at = self._reactor.seconds()
        try:
            with self.refusals_noted():
                yield
        finally:
            self._looked_at = self._reactor.seconds()

    @contextmanager
    def refusals_noted(self) -> Iterator[None]:
        """Take note of how often the cloud refuses a call because of its rate in this block."""
        before = self._calls.throttled
        try:
            yield
        finally:
            self.stretch.looked(self._calls.throttled - before)

    def _forget_others(self) -> None:
        """Forget what is no longer needed to know of VMs that are gone."""
        needed = {*self._ledger.entries, *self._waiting}
        self._since = {id: since for id, since in self._since.items() if id in needed}
        self.doubts.keep({entry.vm.id for entry in self._ledger.live()})

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

    async def _check_missing(self, entry: LedgerEntry) -> None:
        """Ask for a live VM by its id if several lists in a row lacked it."""
        id = entry.vm.id
        if self._ledger.is_new(entry) or id in self.destroying:
            return
        entry.lists_missed += 1
        if entry.lists_missed >= _MAX_LISTS_MISSED:
            await self._look_at(id)

    async def _look_at(self, id: str) -> None:
        """Ask for a VM by its id. One that was known and is not there has ended, unless it is new or other
        answers still show it."""
        try:
            look = partial(self._cloud._thd_get, id=id)
            vm = await self._calls.call(f"look at VM {id}", look, _INSISTENCE)
        except CloudError as error:
            if error.kind is not ErrorKind.STATE:
                raise
            return  # the cloud can't tell about this VM now, but can about others
        if id in self._ledger.destroyed:
            return
        if vm is not None:
            self._ledger.record(vm)
            return
        entry = self._ledger.entries.get(id)
        if entry is None or self._ledger.is_new(entry):
            return
        entry.lists_missed += 1
        if entry.lists_missed >= _MAX_LISTS_MISSED:
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
