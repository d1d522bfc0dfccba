# SPDX-License-Identifier: Apache-2.0
"""Work in network namespaces that have a name."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


def thd_in_namespace(name: str, work: Callable[[], T]) -> T:
    """Call `work` in a new thread that has joined a network namespace; return its result or raise its error.

    :param name: as in `ip netns`. :raise OSError: it can't be joined."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(f"/run/netns/{name}") as file:
                if libc.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
