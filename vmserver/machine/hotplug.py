# SPDX-License-Identifier: Apache-2.0
"""Processors and room on the root disk that the hypervisor adds are taken into use, where no udevd does it.

udevd looks at each device that comes, and a disk that is plugged in makes nine events: under emulation that
takes longer than the disk's mount. So a guest that needs udevd for nothing else stops it after its boot, and
the kernel's events are read here instead: a filter in the kernel drops all but the few that matter, so that a
disk doesn't wake the agent either.

event (Linux, lib/kobject_uevent.c: ACTION@PATH and KEY=VALUE, each ended by NUL)   what is done
add@/devices/system/cpu/cpuN                                                        it is put online
change@...   SUBSYSTEM=block, DEVNAME of the root's disk, RESIZE=1                  the file system grows
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from twisted.internet.interfaces import IReadDescriptor
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.commands import Command, check
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.reactors import IReactor

GROW = ("/lib/systemd/systemd-growfs", "/")
ROOT_DISK = "vda"
SYS = Path("/sys")
_GROW_SECONDS = 60.0
_DATAGRAM = 8 * 1024  # bytes; the kernel's are 2 KiB at most
_READS_AT_ONCE = 16
_KOBJECT_UEVENT, _KERNELS_EVENTS = 15, 1  # NETLINK_KOBJECT_UEVENT, and its group of the kernel's own events
_PROCESSOR = re.compile(r"/devices/system/cpu/cpu[0-9]+")
_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x15, 0x06  # linux/bpf_common.h
# Take `change@…` and `add@/devices/system/…`, drop all else. A jump is relative: if equal, if not.
_FILTER = (
    (_LOAD_BYTE, 0, 0, 0),
    (_JUMP_IF_EQUAL, 3, 0, ord("c")),
    (_LOAD_WORD, 0, 0, len("add@/devices/")),
    (_JUMP_IF_EQUAL, 1, 0, int.from_bytes(b"syst", "big")),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)

_log = Logger()


def open_socket() -> socket.socket:
    """Return a socket that receives the events that may matter. :raise OSError: that failed."""
    flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    made = socket.socket(socket.AF_NETLINK, flags, _KOBJECT_UEVENT)
    try:
        attach_filter(made)
        made.bind((0, _KERNELS_EVENTS))
    except BaseException:
        made.close()
        raise
    return made


def attach_filter(made: socket.socket) -> None:
    """Have the kernel drop what no event here begins with. :raise OSError: it can't."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in _FILTER))
    program = struct.pack("@HP", len(_FILTER), ctypes.addressof(code))
    made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def fields_of(datagram: bytes) -> dict[str, str]:
    """Return an event's fields."""
    words = datagram.decode(errors="replace").split("\0")[1:]
    return {key: value for key, equals, value in (word.partition("=") for word in words) if equals}


@implementer(IReadDescriptor)
class Hotplug:
    """Listens for hardware that is plugged into a running machine.

    :param opener: opens the socket, by `open_socket`.
    :param grow: a command that makes the root's file system as large as its disk.
    """

    def __init__(
        self,
        reactor: IReactor,
        opener: Callable[[], socket.socket] = open_socket,
        sys: Path = SYS,
        grow: Sequence[str] = GROW,
    ) -> None:
        self._reactor = reactor
        self._opener = opener
        self._sys = sys
        self._grow = grow
        self._socket: socket.socket | None = None

    def begin(self) -> None:
        """Begin to listen. Idempotent. If that fails, what is plugged in stays unused, as is logged."""
        if self._socket is not None:
            return
        try:
            self._socket = self._opener()
        except OSError as error:
            _log.error(
                "added processors and room on the disk stay unused, as the kernel reports none: {error}",
                error=error.strerror,
            )
            return
        self._reactor.addReader(self)

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._socket is not None:
            self._reactor.removeReader(self)
            self._socket.close()
            self._socket = None

    # IReadDescriptor

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def doRead(self) -> None:
        for _ in range(_READS_AT_ONCE):
            if self._socket is None:
                return
            try:
                datagram, (sender, _) = self._socket.recvfrom(_DATAGRAM)
            except BlockingIOError:
                return
            except OSError as error:  # ENOBUFS: some were lost
                _log.warn("events of devices were lost: {error}", error=error.strerror)
                continue
            if sender == 0:  # the kernel; a process could send too
                self._take(fields_of(datagram))

    def connectionLost(self, reason: Failure) -> None:
        self.stop()

    def logPrefix(self) -> str:
        return "hotplug"

    def _take(self, event: dict[str, str]) -> None:
        path = event.get("DEVPATH", "")
        if event.get("ACTION") == "add" and _PROCESSOR.fullmatch(path):
            self._do(f"{path} is used", run_in_thread(self._reactor, self._thd_use, path))
        elif event.get("DEVNAME") == ROOT_DISK and event.get("RESIZE") == "1":
            growing = check(self._reactor, Command(self._grow, _GROW_SECONDS))
            self._do("the root's file system has grown", growing)

    def _do(self, what: str, work: Awaitable[object]) -> None:
        async def done() -> None:
            try:
                await work
                _log.info("{what}", what=what)
            except Exception as error:
                _log.error("{what}: it failed: {error}", what=what, error=error)

        start(done())

    def _thd_use(self, path: str) -> None:
        online = self._sys / path.lstrip("/") / "online"
        if online.exists() and online.read_text().strip() == "0":
            online.write_text("1")
