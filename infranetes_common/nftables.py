# SPDX-License-Identifier: Apache-2.0
"""Execution of nftables scripts, by the nftables library where it is installed.

Starting a program for each change takes longest on slow processors: in a VM without KVM, the library needs a
thirtieth of the program's time. Large scripts go to the program, because it returns its memory.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from typing import TypeVar

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.commands import Command, check
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.reactors import IReactor

LIBRARY = "libnftables.so.1"
LARGE = 16 << 10  # characters; a longer script is run by the program nft
SECONDS = 60.0  # enough for a transaction of some hundred elements in an emulated VM

_NETFILTER = 12  # NETLINK_NETFILTER
_one_at_a_time = threading.Lock()  # the library is not documented to be thread-safe
_log = Logger()

T = TypeVar("T")


class Library:
    """libnftables, in the network namespace of the thread that makes this. :raise OSError: there is none."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        # If it can't open such a socket, the library ends the process, so try it first.
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER).close()
        self._library.nft_ctx_new.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.nft_ctx_new(0))
        if not self._context:
            raise OSError("libnftables can't be initialized")
        self._library.nft_ctx_buffer_output(self._context)
        self._library.nft_ctx_buffer_error(self._context)
        for name in ("output", "error"):
            getattr(self._library, f"nft_ctx_get_{name}_buffer").restype = ctypes.c_char_p

    def close(self) -> None:
        """Release the namespace, which would otherwise stay. Run nothing afterwards."""
        self._library.nft_ctx_free(self._context)

    def thd_run(self, script: str) -> None:
        """Run a script, which is one transaction. Blocks. :raise InfranetesError: why that fails."""
        with _one_at_a_time:
            failed = self._library.nft_run_cmd_from_buffer(self._context, script.encode())
            self._library.nft_ctx_get_output_buffer(self._context)  # empties the buffer
            why: bytes = self._library.nft_ctx_get_error_buffer(self._context)
        if failed:
            raise InfranetesError(f"nftables refuses: {why.decode(errors='replace').strip()[:1000]}")


class Scripts:
    """Runs scripts in a network namespace.

    :param namespace: its name; none: the process's own.
    :param library: whether the library may be used. It reads others' tables too, and one that a newer
        release has made can crash it, and with it the process.
    """

    def __init__(self, reactor: IReactor, namespace: str = "", *, library: bool = True) -> None:
        self._reactor = reactor
        self._namespace = namespace
        self._lock = DeferredLock()
        self._library: Library | None = None
        self._missing = not library

    async def run(self, script: str) -> None:
        """Run a script, which is one transaction. :raise InfranetesError: why that fails."""
        async with self._lock:
            if len(script) < LARGE and not self._missing:
                try:
                    await run_in_thread(self._reactor, self._thd_run, script)
                    return
                except OSError as error:
                    self._missing = True
                    _log.info(
                        "nftables is changed by its program, which is slow, because its library can't be "
                        "used: {error}",
                        error=error,
                    )
            inside = ["ip", "netns", "exec", self._namespace] if self._namespace else []
            await check(self._reactor, Command([*inside, "nft", "-f", "-"], SECONDS, script.encode()))

    def _thd_run(self, script: str) -> None:
        """Run a script by the library. :raise OSError: there is none."""
        if self._namespace:  # others may want to delete it: don't keep a library open in it
            library = thd_in_namespace(self._namespace, Library)
        else:
            library = self._library = self._library or Library()
        try:
            library.thd_run(script)
        finally:
            if library is not self._library:
                library.close()
