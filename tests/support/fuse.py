# SPDX-License-Identifier: Apache-2.0
"""Empty directories of a file server that can be made to hang, as NFS does when its server has gone.

The server is a process that speaks the kernel's FUSE protocol (linux/fuse.h). While it is stopped by SIGSTOP,
every process that looks at one of its mounts hangs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 1, 2, 3, 17, 26, 27, 28, 29
_INTERRUPT, _DESTROY, _BATCH_FORGET = 36, 38, 42
_REQUEST = struct.Struct("=IIQQIIII")
_ANSWER = struct.Struct("=IiQ")


class HangingMounts:
    """Mounts at these directories, which are created if need be, until `end`."""

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        for directory in directories:
            directory.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.support.fuse", *map(str, directories)]
        self._server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        said = self._server.stdout.readline()
        if said != b"mounted\n":
            self.end()
            raise AssertionError("no FUSE file system can be mounted here")
        self._connections = [str(os.minor(directory.stat().st_dev)) for directory in directories]

    def hang(self) -> None:
        """Make every access wait from now on."""
        self._server.send_signal(signal.SIGSTOP)

    @property
    def awaited(self) -> bool:
        """Whether accesses to all of the mounts wait at this moment."""
        with tempfile.TemporaryDirectory() as control:
            subprocess.run(["mount", "-t", "fusectl", "none", control], check=True)
            try:
                counts = [Path(control, each, "waiting").read_text() for each in self._connections]
            finally:
                subprocess.run(["umount", control], check=True)
        return all(map(int, counts))

    def go_on(self) -> None:
        """Answer the accesses that wait, and serve on."""
        self._server.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Unmount, and end the server; accesses that still wait get an error. Idempotent."""
        for directory in self._directories:
            subprocess.run(["umount", "--lazy", directory], check=False, stderr=subprocess.DEVNULL)
        self._server.kill()
        self._server.wait()
        if self._server.stdout is not None:
            self._server.stdout.close()


def _mount(directory: str) -> int:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hanging", os.fsencode(directory), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    return device


def _answer(operation: int) -> bytes | int:
    """Return what follows an answer's head, or an error number."""
    if operation == _INIT:
        return struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0)
    if operation == _GETATTR:  # with a validity of 0 seconds, so that the kernel asks each time
        attributes = struct.pack("=QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
        return struct.pack("=QII", 0, 0, 0) + attributes
    if operation == _OPENDIR:
        return bytes(16)
    if operation in (_READDIR, _RELEASEDIR):
        return b""
    if operation == _STATFS:
        return bytes(80)
    return errno.ENOENT if operation == _LOOKUP else errno.ENOSYS


def _serve(device: int) -> bool:
    try:
        request = os.read(device, 1 << 20)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.EINTR)  # the request was interrupted meanwhile
    _, operation, unique, *_ = _REQUEST.unpack_from(request)
    if operation in (_FORGET, _BATCH_FORGET, _INTERRUPT, _DESTROY):
        return True
    answer = _answer(operation)
    body, failure = (b"", -answer) if isinstance(answer, int) else (answer, 0)
    try:
        os.write(device, _ANSWER.pack(_ANSWER.size + len(body), failure, unique) + body)
    except OSError as failed:
        return failed.errno == errno.ENOENT
    return True


def main(directories: list[str]) -> None:
    """Serve the directories until all are unmounted."""
    poll = select.poll()
    devices = {_mount(directory) for directory in directories}
    for device in devices:
        poll.register(device, select.POLLIN)
    print("mounted", flush=True)
    while devices:
        for device, _ in poll.poll():
            if not _serve(device):
                poll.unregister(device)
                devices.discard(device)


if __name__ == "__main__":
    main(sys.argv[1:])
