# SPDX-License-Identifier: Apache-2.0
"""`spawnProcess` without a fork, for what is talked to while it runs (see `infranetes_common.commands`).

A fork copies the page tables of the whole process, the child's exec throws them away, and meanwhile both copy
each page that they write to. In an emulated VM that is most of what a command in a container costs. Twisted
24.11 starts a child by posix_spawn if it has no directory of its own; earlier releases always fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.interfaces import IReactorFDSet
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol

from infranetes_common.errors import Unavailable

_ROOM = 1024  # bytes for one of the C library's structures, which has 80 and 336
_SET_DEFAULT_SIGNALS = 0x04  # POSIX_SPAWN_SETSIGDEF
_SIGNALS = 128  # bytes of a sigset_t

_libc = ctypes.CDLL(None)
_CLOSE_FROM = getattr(_libc, "posix_spawn_file_actions_addclosefrom_np", None)  # glibc 2.34


def spawn(
    reactor: IReactorFDSet,
    protocol: ProcessProtocol,
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    descriptors: Mapping[int, int | str],
) -> None:
    """Start a child as `spawnProcess` does. It has no other descriptors, and ignores no signals.

    :param command: begins with the path of the program. :param directory: what it runs in.
    :param descriptors: see `spawnProcess`.
    :raise Unavailable: it can't be started.
    """
    try:
        _Spawned(  # type: ignore[no-untyped-call]
            reactor,
            os.fsencode(command[0]),
            [os.fsencode(word) for word in command],
            {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            directory,
            protocol,
            None,
            None,
            dict(descriptors),
        )
    except OSError as error:
        raise Unavailable(f"{command[0]} can't be started: {error.strerror}; try again") from error


class _Spawned(Process):
    """Twisted's process, started in another way."""

    def _fork(
        self,
        path: str,
        uid: None,
        gid: None,
        executable: bytes,
        args: Sequence[bytes],
        environment: Mapping[bytes, bytes],
        **kwargs: Any,  # Any: as in Twisted
    ) -> None:
        if _CLOSE_FROM is None:
            super()._fork(path, uid, gid, executable, args, environment, **kwargs)  # type: ignore[no-untyped-call]
            return
        words = [name + b"=" + value for name, value in environment.items()]
        self.pid = _posix_spawn(executable, args, words, os.fsencode(path), kwargs["fdmap"])
        self.status = -1  # as Twisted's own leaves it


def _posix_spawn(
    program: bytes,
    words: Sequence[bytes],
    environment: Sequence[bytes],
    directory: bytes,
    descriptors: Mapping[int, int],
) -> int:
    """Return the pid of a new child, which has executed the program. :raise OSError: it has not."""
    assert _CLOSE_FROM is not None
    actions, attributes, signals, pid = (
        ctypes.create_string_buffer(_ROOM),
        ctypes.create_string_buffer(_ROOM),
        ctypes.create_string_buffer(_SIGNALS),
        ctypes.c_int(),
    )
    end = max(descriptors) + 1
    with contextlib.ExitStack() as cleanup:
        _check(_libc.posix_spawn_file_actions_init(actions))
        cleanup.callback(_libc.posix_spawn_file_actions_destroy, actions)
        _check(_libc.posix_spawn_file_actions_addchdir_np(actions, directory))
        for number in range(end):
            if number in descriptors:
                # From a number that no other one of the child's takes the place of.
                apart = fcntl.fcntl(descriptors[number], fcntl.F_DUPFD_CLOEXEC, end)
                cleanup.callback(os.close, apart)
                _check(_libc.posix_spawn_file_actions_adddup2(actions, apart, number))
            else:
                _check(_libc.posix_spawn_file_actions_addclose(actions, number))
        _check(_CLOSE_FROM(actions, end))
        _check(_libc.posix_spawnattr_init(attributes))
        cleanup.callback(_libc.posix_spawnattr_destroy, attributes)
        _libc.sigfillset(signals)
        _check(_libc.posix_spawnattr_setsigdefault(attributes, signals))
        _check(_libc.posix_spawnattr_setflags(attributes, ctypes.c_short(_SET_DEFAULT_SIGNALS)))
        _check(
            _libc.posix_spawn(
                ctypes.byref(pid), program, actions, attributes, _array(words), _array(environment)
            )
        )
    return pid.value


def _array(words: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(words) + 1))(*words, None)


def _check(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))
