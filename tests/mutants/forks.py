# SPDX-License-Identifier: Apache-2.0
"""A process that has loaded tests, and forks for each mutant: ``python -m tests.mutants.forks``.

Loading takes seconds, a fork milliseconds. It reads from its standard input, a socket, a line of JSON with
the names of tests to load, then `Order`s. It answers each line with `DONE`, or with `NOT_HERE` if a bug
can't be put into loaded code. A bug is put there by the code objects of the functions that have it, since a
module that is imported again would be another one than what the tests have of it.

A fork has namespaces of its own, with which all ends that a mutant leaves in the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import NoReturn

import cattrs
from twisted.internet import reactor
from twisted.internet.epollreactor import EPollReactor
from twisted.trial.runner import TestLoader

from tests.harness import isolation
from tests.mutants.imports import PRODUCT
from tests.mutants.run_tests import DONE, NOT_HERE, ROOT, Order, Request, run

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x20000000, 0x40000000  # unshare(2)
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # mount(2)

Key = tuple[str, int]
"""A function's qualified name, and which of those of this name in its module it is, from the top."""


class NotHere(Exception):
    """The bug can't be put into loaded code."""


class Loaded:
    """The functions of the product's modules that are in memory."""

    def __init__(self) -> None:
        inside = tuple(f"{ROOT}/{package}/" for package in PRODUCT)
        self._functions: dict[str, list[FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(inside):
                self._functions[each.__code__.co_filename].append(each)

    def change(self, order: Order) -> None:
        """Give the functions of a module the code of another text, where it is another one.

        :raise NotHere: the module is not loaded, or none of its loaded functions has other code."""
        path = str(ROOT / order.module)
        before, after = (_codes(compile(text, path, "exec")) for text in (order.original, order.text))
        keys = {(code.co_qualname, code.co_firstlineno): key for key, code in before.items()}
        changed = 0
        for function in self._functions.get(path, []):
            key = keys.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            code = None if key is None else after.get(key)
            if code is None or key is None or _same(before[key], code):
                continue
            try:
                function.__code__ = code
            except ValueError:  # it has another number of free variables
                raise NotHere from None
            changed += 1
        if not changed:
            raise NotHere


def _same(one: CodeType, other: CodeType) -> bool:
    """Return whether two functions do the same; where they stand in the text does not matter."""
    if (one.co_code, one.co_names, one.co_varnames) != (other.co_code, other.co_names, other.co_varnames):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(
        _same(left, right)
        if isinstance(left, CodeType) and isinstance(right, CodeType)
        else (type(left), left) == (type(right), right)
        for left, right in pairs
    )


def _codes(module: CodeType) -> Mapping[Key, CodeType]:
    """Return the code of all functions of a module, those inside of functions too."""
    found: dict[Key, CodeType] = {}
    counted: dict[str, int] = defaultdict(int)
    for code in _within(module):
        found[code.co_qualname, counted[code.co_qualname]] = code
        counted[code.co_qualname] += 1
    return found


def _within(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _within(each)


class Forks:
    """Runs orders, each in a fork. :param isolated: in namespaces of its own."""

    def __init__(self, loaded: Loaded, isolated: bool) -> None:
        self._loaded = loaded
        self._isolated = isolated

    def run(self, order: Order) -> str:
        """Run an order, and return the answer."""
        supervisor = os.fork()
        if not supervisor:
            os._exit(self._supervise(order))
        code = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
        return DONE if code == 0 else NOT_HERE

    def _supervise(self, order: Order) -> int:
        """Run an order in a fork, for its time at most, and as long as standard input is open."""
        try:
            if order.text != order.original:
                self._loaded.change(order)
        except NotHere:
            return 1
        if self._isolated:
            _leave_namespaces()
        first = os.fork()
        if not first:
            self._be_first(order.request)
        ended = os.pidfd_open(first)
        ready, _, _ = select.select([ended, 0], [], [], order.seconds)
        if ended not in ready:
            os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        return 0

    def _be_first(self, request: Request) -> NoReturn:
        """Be the first process of namespaces: with it all others there end."""
        if self._isolated:
            isolation.mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
            isolation.mount("proc", "/proc", "proc")
            isolation.isolate()
        if not (child := os.fork()):
            _be_alone()
            run(request)
            sys.stdout.flush()
            os._exit(0)
        while os.waitpid(-1, 0)[0] != child:
            pass
        os._exit(0)


def _leave_namespaces() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no namespaces can be made")


def _be_alone() -> None:
    """Give up what a fork shares with its parent: its input, and the reactor's epoll and waking pipe."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    assert isinstance(reactor, EPollReactor)
    reactor._poller.close()
    reactor.__init__()  # type: ignore[misc]


def main() -> None:
    """Load, and run orders until standard input is closed."""
    with socket.socket(fileno=os.dup(0)) as link, link.makefile("rw") as lines:
        TestLoader().loadByNames(json.loads(lines.readline()), recurse=True)
        if threading.active_count() > 1:
            raise SystemExit("what is imported has started a thread, which a fork can't take along")
        forks = Forks(Loaded(), isolation.possible())
        gc.collect()
        gc.freeze()
        lines.write(DONE)
        lines.flush()
        for line in lines:
            lines.write(forks.run(cattrs.structure(json.loads(line), Order)))
            lines.flush()


if __name__ == "__main__":
    main()
