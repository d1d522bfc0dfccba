# SPDX-License-Identifier: Apache-2.0
"""The serial console of a VM that boots an image: see `IConsole`.

QEMU itself appends what the guest writes to a file, whether or not a daemon runs. Its socket is the keyboard
alone: what comes from it is in the file too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from zope.interface import implementer

from infranetes.providers.hypervisor import IConsole
from infranetes.providers.qemu.program.sockets import CONSOLE
from infranetes.providers.qemu.vm import console_file
from infranetes.providers.qemu.vm.keyboard import Keyboard
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import Notifier, deferred, run_in_thread
from infranetes_common.concurrency.threads import LOGS
from infranetes_common.errors import InvalidArgument, NotFound, Unavailable
from infranetes_common.reactors import IReactor

_MOST_READ = 1 << 20  # bytes at once
_FIRST_LOOK, _LAST_LOOK = 0.02, 0.4  # seconds between looks at a file that somebody waits for


@implementer(IConsole)
class Console:
    """The console of one VM. :param ended: tells whether nothing more will be written."""

    writable = True

    def __init__(self, reactor: IReactor, vm: Vm, ended: Callable[[], bool]) -> None:
        self._reactor = reactor
        self._vm = vm
        self._ended = ended
        self._destroyed = False
        self._last_end = 0
        self._last_begin = 0
        self._changed = Notifier()
        self._seen = 0  # the end that those who wait know
        self._pause = _FIRST_LOOK
        self._look: IDelayedCall | None = None
        self._keyboard = Keyboard(reactor, vm.paths.sockets / CONSOLE, self._wake)

    @property
    def begin(self) -> int:
        """See `IConsole`."""
        with contextlib.suppress(OSError):  # it is gone with the VM, or not made yet
            self._last_begin = console_file.begin_of(self._vm.paths.console)
        return self._last_begin

    @property
    def end(self) -> int:
        """See `IConsole`."""
        with contextlib.suppress(OSError):
            self._last_end = os.stat(self._vm.paths.console).st_size
        return self._last_end

    @property
    def ended(self) -> bool:
        """See `IConsole`."""
        return self._destroyed or self._ended()

    @deferred
    async def read(self, offset: int, size: int) -> bytes:
        """See `IConsole`."""
        self._check()
        if offset < 0 or size < 0:
            raise InvalidArgument(f"a console has no {size} bytes at {offset}")
        path = self._vm.paths.console
        try:
            data = await run_in_thread(
                self._reactor, console_file.read, path, offset, min(size, _MOST_READ), purpose=LOGS
            )
        except FileNotFoundError:
            raise NotFound(f"VM {self._vm.record.id} has no console any more") from None
        except OSError as error:
            raise Unavailable(f"the console of VM {self._vm.record.id} can't be read: {error}") from error
        if data is None:
            raise InvalidArgument(
                f"the console of VM {self._vm.record.id} is kept from {self.begin} to {self.end}, and has no "
                f"byte {offset}"
            )
        return data

    def changed(self) -> Deferred[None]:
        """See `IConsole`."""
        if not self._changed.waiters:
            self._seen, self._pause = self.end, _FIRST_LOOK
        waiting = self._changed.wait()
        if self._look is None:
            self._look = self._reactor.callLater(0 if self.ended else self._pause, self._look_again)
        return waiting

    def _look_again(self) -> None:
        self._look = None
        if self.ended or self.end != self._seen:
            self._seen = self._last_end
            self._changed.notify()
        elif self._changed.waiters:
            self._pause = min(self._pause * 1.5, _LAST_LOOK)
            self._look = self._reactor.callLater(self._pause, self._look_again)

    def _wake(self) -> None:
        """Look now."""
        if self._look is not None:
            self._look.reset(0)

    def write(self, data: bytes) -> Deferred[None]:
        """See `IConsole`."""
        return self._typed(data)

    @deferred
    async def _typed(self, data: bytes) -> None:
        self._check()
        if not self._vm.alive:
            raise Unavailable(f"VM {self._vm.record.id} does not run: nobody reads its console")
        await self._keyboard.type(data)

    def _check(self) -> None:
        if self._destroyed:
            raise NotFound(f"there is no VM {self._vm.record.id} any more")

    def tell(self) -> None:
        """Tell those who wait that the end may have come."""
        self._wake()

    def close(self, destroyed: bool) -> None:
        """Release what is held. Those who wait are told if the VM is `destroyed`."""
        self._keyboard.close()
        if destroyed:
            _ = self.begin, self.end
            self._destroyed = True
            self._changed.notify()
        if self._look is not None:
            self._look.cancel()
            self._look = None
