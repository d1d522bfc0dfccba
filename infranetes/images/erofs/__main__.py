# SPDX-License-Identifier: Apache-2.0
"""The process that makes images, each in a child of its own. `build` starts it, with three descriptors:

0   a socket: each message is JSON. An order has a number, the compression, the diff id and the limits, and
    descriptors: the layer, the image, and for some layers the images of those below. {"kill": NUMBER} ends
    the child that works at an order.
1   a line of JSON for each order, when its child has ended: its number, the exit code, and its messages.
2   for people, if this program is faulty.

It reads no layer itself. A child is a copy of it in which all modules are loaded, so that it begins at
once; it gives up all rights, makes one image and ends. So a layer that takes a child over, has it die or has
it use up what it may, spoils no other's image.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn, cast

import attrs

from infranetes.images.erofs import sandbox
from infranetes.images.erofs.convert import work
from infranetes.images.erofs.limits import FAILED, SAID_BYTES, Limits

_MESSAGE_BYTES = 16 * 1024
_MAX_BELOW = 200  # more than the layers that a VM can stack
_DESCRIPTORS = 512  # this process's limit; it needs four for each child, and those of one order
_LAYER, _IMAGE = 0, 1  # indices in an order's descriptors, and then the child's own descriptors


@attrs.frozen
class _Child:
    """A child that works. :ivar said: where it tells why it fails. :ivar ended: readable once it has."""

    order: int
    pid: int
    said: int
    ended: int


class Server:
    """Serves the daemon until it goes away."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._children: dict[int, _Child] = {}  # by `ended`
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)

    def serve(self) -> None:
        """Work until the daemon closes its end of the socket. Children die with this process."""
        while True:
            for descriptor, _ in self._poll.poll():
                child = self._children.get(descriptor)
                if child is not None:
                    self._reap(child)
                elif not self._take():
                    return

    def _take(self) -> bool:
        """Take a message. Returns False: there will be no more."""
        data, descriptors, _flags, _address = socket.recv_fds(self._orders, _MESSAGE_BYTES, 2 + _MAX_BELOW)
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            for child in self._children.values():
                if child.order == message["kill"]:
                    os.kill(child.pid, signal.SIGKILL)
            return True
        try:
            self._begin(message, descriptors)
        except OSError as e:
            _answer(message["order"], FAILED, os.strerror(e.errno or 0))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _begin(self, order: Mapping[str, object], descriptors: list[int]) -> None:
        said, says = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                _be_child(order, descriptors, says, parent)
            child = _Child(cast(int, order["order"]), pid, said, os.pidfd_open(pid))
        except BaseException:
            os.close(said)
            raise
        finally:
            os.close(says)
        self._children[child.ended] = child
        self._poll.register(child.ended, select.POLLIN)

    def _reap(self, child: _Child) -> None:
        _pid, status = os.waitpid(child.pid, 0)
        try:
            said = os.read(child.said, SAID_BYTES)
        except BlockingIOError:  # it said nothing, and another process holds the other end
            said = b""
        self._poll.unregister(child.ended)
        del self._children[child.ended]
        os.close(child.ended)
        os.close(child.said)
        _answer(child.order, os.waitstatus_to_exitcode(status), said.decode(errors="replace"))


def _answer(order: int, code: int, said: str) -> None:
    line = json.dumps({"order": order, "code": code, "said": said})
    os.write(1, f"{line}\n".encode())  # far less than a pipe holds, so it is written whole


def _be_child(order: Mapping[str, object], descriptors: list[int], says: int, parent: int) -> NoReturn:
    """Make one image, in the child."""
    code = FAILED
    try:
        below = descriptors[2:]
        os.dup2(descriptors[_LAYER], _LAYER)
        os.dup2(descriptors[_IMAGE], _IMAGE)
        os.dup2(says, 2)
        for first, last in itertools.pairwise([2, *sorted(below), _DESCRIPTORS]):
            os.closerange(first + 1, last)
        limits = Limits(**cast(dict[str, int], order["limits"]))
        sandbox.enter(limits, parent)
        layer = str(order["compression"]), str(order["diff_id"])
        # Packages may replace these files under a daemon of 0.2.0, which does not say it.
        has_lower_layers = order.get("below", bool(below))
        code, said = work(_LAYER, _IMAGE, *layer, limits, below if has_lower_layers else None)
        os.write(2, said.encode()[:SAID_BYTES])
    finally:
        os._exit(code)  # at once, though its threads may still be reading


def main() -> None:
    """Serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the daemon
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    gc.disable()  # a child's memory is bounded, and it makes few reference cycles
    Server(socket.socket(fileno=0)).serve()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
