# SPDX-License-Identifier: Apache-2.0
"""Stopping VMs that wait for a pod, and starting each again; see `providers.stopping`.

    what is done                        file of the token   the cloud        the ledger
    a stop begins                       written             running          RUNNING
    the cloud is asked                  there               stopping         RUNNING
    it has stopped the VM               there               stopped          STOPPED
    its identity is taken away          there               stopped          STOPPED
    a launch of its token: the cloud    there               pending          STOPPED
    has an identity, and starts it
    the cloud has accepted that         removed             pending          PENDING, as if launched
    or it can't be started: the VM is   removed             ended            (none), and a VM is launched
    destroyed

Without the file a VM that the cloud shows as stopped has ended, as somebody else has stopped it. Each step
may be made again, by the next daemon too, which finds from the file and the cloud where the one before was.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Generic

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.interface import Action, CloudError, CloudVM, D, ErrorKind, StoppingCloud
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import KeyedLock, backoff, replace_file, run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.reactors import IReactor

_TOKEN = re.compile(r"[0-9a-f]{32}")
_LATER = (ErrorKind.THROTTLED, ErrorKind.TRANSIENT, ErrorKind.CREDENTIALS)
"""The kinds of failures of a start that a launch would meet, too: a later call may succeed."""

_GROWTH, _LONGEST_PAUSE = 1.3, 4.0  # of pauses, in seconds

_log = Logger()


class StoppedFiles:
    """A directory with an empty file for each VM that is stopped, or is to be: its name is the VM's token."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _thd_load(self) -> set[str]:
        """Return the tokens. :raise FailedPrecondition: the directory can't be used."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return {file.name for file in self._directory.iterdir() if _TOKEN.fullmatch(file.name)}
        except OSError as error:
            raise FailedPrecondition(f"{self._directory} can't be read: {error}; see state_dir") from None

    def _thd_add(self, token: str) -> None:
        """Record a stop. :raise Unavailable: it can't be written."""
        try:
            replace_file(self._directory / token, "")
        except OSError as error:
            raise Unavailable(f"{self._directory / token} can't be written: {error}") from None

    def _thd_remove(self, token: str) -> None:
        """Forget a stop. Idempotent."""
        with contextlib.suppress(OSError):
            (self._directory / token).unlink(missing_ok=True)


class Stopper(Generic[D]):
    """Stops and starts the VMs of one provider.

    :param locks: by token; `start` is called with it held.
    :param waiting: makes lists show a VM's changes, as `Watcher.waiting`. :param destroy: destroys a VM.
    :param get: looks at a VM.
    """

    def __init__(
        self,
        reactor: IReactor,
        cloud: StoppingCloud[D],
        settings: CloudSettings,
        calls: Calls[D],
        ledger: Ledger,
        locks: KeyedLock[str],
        files: StoppedFiles,
        waiting: Callable[[str], AbstractContextManager[Callable[[], Deferred[None]]]],
        destroy: Callable[[CloudVM], Awaitable[None]],
        get: Callable[[str], Awaitable[CloudVM]],
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._ledger = ledger
        self._locks = locks
        self._files = files
        self._waiting = waiting
        self._destroy = destroy
        self._get = get

    async def load(self) -> None:
        """Find what earlier daemons have stopped. Called before VMs are listed.

        :raise FailedPrecondition: the directory can't be used."""
        self._ledger.stopped |= await run_in_thread(self._reactor, self._files._thd_load)

    async def forget(self, token: str) -> None:
        """Forget that a VM was stopped, once it is destroyed or started. Idempotent."""
        if token in self._ledger.stopped:
            await run_in_thread(self._reactor, self._files._thd_remove, token)
            self._ledger.stopped.discard(token)

    async def stop(self, vm: CloudVM) -> CloudVM:
        """Stop a VM, and take its identity away. Returns it, STOPPED.

        :raise Unavailable: it has ended. :raise NotFound: it was destroyed meanwhile."""
        if vm.state is InstanceState.ENDED:
            raise Unavailable(f"VM {vm.id} has ended: {vm.detail or 'the cloud gives no reason'}")
        async with self._locks.held(vm.token):
            await run_in_thread(self._reactor, self._files._thd_add, vm.token)
            self._ledger.stopped.add(vm.token)
            if vm.state is not InstanceState.STOPPED:
                await self._ask_for_stop(vm)
        await self._wait_stopped(vm.id)
        async with self._locks.held(vm.token):
            stopped = self._ledger.last_said(vm.id)
            if stopped is None or stopped.state is not InstanceState.STOPPED:
                raise NotFound(f"VM {vm.id} is stopped no longer")
            await self._take_identity(stopped)
        return stopped

    async def _take_identity(self, vm: CloudVM) -> None:
        what, take = f"take the identity of VM {vm.id}", partial(self._cloud._thd_take_identity, vm=vm)
        deadline, pauses = self._reactor.seconds() + self._settings.destroy_seconds, self._pauses()
        while not await self._calls.call(what, take, action=Action.CHANGE):
            if self._reactor.seconds() > deadline:
                raise CloudError(ErrorKind.TRANSIENT, f"{what}: the cloud has not done it yet")
            await sleep(self._reactor, next(pauses))

    async def _ask_for_stop(self, vm: CloudVM) -> None:
        try:
            await self._calls.call(
                f"stop VM {vm.id}", partial(self._cloud._thd_stop, vm=vm), action=Action.CHANGE
            )
        except CloudError as error:
            if error.kind is ErrorKind.INVALID:
                await self.forget(vm.token)  # it goes on
            raise

    async def _wait_stopped(self, id: str) -> None:
        with self._waiting(id) as changed:
            while (vm := self._ledger.last_said(id)) is not None:
                if vm.state is InstanceState.STOPPED:
                    return
                if vm.state is InstanceState.ENDED:
                    raise Unavailable(f"VM {id} has ended: {vm.detail or 'the cloud gives no reason'}")
                await changed()
        raise NotFound(f"VM {id} was destroyed meanwhile")

    async def start(self, token: str, identity: bytes) -> CloudVM | None:
        """Start the stopped VM of a token, if there is one. If it can't be started, it is destroyed.

        :return: None: a VM is to be launched.
        :raise CloudError: it is not known whether it can be started; a later call may tell."""
        if token not in self._ledger.stopped:
            return None
        vm = self._ledger.for_token(token)
        if vm is not None and await self._is_started(vm, identity):
            await self.forget(token)
            self._ledger.record_start(vm.id)
            return await self._get(vm.id)  # it may run by now, which no look is to be waited for to tell
        if vm is not None:
            await self._destroy(vm)
        await self.forget(token)
        return None

    async def _is_started(self, known: CloudVM, identity: bytes) -> bool:
        """Return whether the cloud starts a VM, or has started it for an earlier daemon."""
        what = f"start VM {known.id}"
        pauses = self._pauses()
        wait_until = math.inf  # for what the cloud does with it; known once the cloud has told of that
        while True:
            vm = await self._calls.call(what, partial(self._cloud._thd_get, id=known.id))
            goes_on = vm is not None and (vm.halted or vm.halting or vm.state is not InstanceState.ENDED)
            if vm is None or not goes_on:
                return False
            is_on = not (vm.halted or vm.halting)
            if is_on and (wait_until < math.inf or not self._ledger.has_just_stopped(known.id)):
                return True  # and what says so is no older than the VM's stop
            try:
                start = partial(self._cloud._thd_start, vm=vm, identity=identity)
                starting = await self._calls.call(what, start, circuit="launch", action=Action.CHANGE)
                await self._wait_for_operation(starting)
                return True
            except CloudError as error:
                if error.kind in _LATER:
                    raise
                now = self._reactor.seconds()
                if error.kind is not ErrorKind.STATE or now > wait_until:
                    _log.warn(
                        "{cloud}: VM {vm}, which waited stopped, can't be started, another is made: {error}",
                        cloud=self._cloud.location,
                        vm=known.id,
                        error=error,
                    )
                    return False
                wait_until = min(wait_until, now + self._settings.settle_seconds)
            await sleep(self._reactor, next(pauses))

    async def _wait_for_operation(self, vm: CloudVM) -> None:
        """Wait until the operation of a start has ended, or a failure would show in lists as well.

        :raise CloudError: the VM is not started."""
        deadline, pauses = self._reactor.seconds() + self._settings.settle_seconds, self._pauses()
        what = f"see whether VM {vm.id} starts"
        while vm.operation and self._reactor.seconds() < deadline:
            await sleep(self._reactor, next(pauses))
            vm = await self._calls.call(what, partial(self._cloud._thd_poll_launch, vm=vm))

    def _pauses(self) -> Iterator[float]:
        """Return the pauses between looks at what the cloud does with one VM: each costs a call."""
        first = self._settings.poll_seconds
        return backoff(first, max(first, _LONGEST_PAUSE), factor=_GROWTH)
