# SPDX-License-Identifier: Apache-2.0
"""What the daemon has of a VM that sleeps is given back without a pause of the reactor, and in its thread."""

from __future__ import annotations

import os
import socket
import threading
from unittest import mock

from twisted.internet.interfaces import IReadDescriptor
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.sleep.doorbell import Doorbell
from infranetes.providers.qemu.sleep.frames import Sleeping
from infranetes.providers.qemu.sleep.slumber import Slumber
from infranetes_common.reactors import installed

reactor = installed()


class CloseTests(TestCase):
    async def test_the_tap_is_closed_in_a_thread_after_the_reactor_has_let_it_go(self) -> None:
        """A thread must not change the reactor's files, and the kernel takes long to close a tap."""
        ours, other = socket.socketpair()
        self.addCleanup(other.close)
        number = ours.detach()
        sleeping = Sleeping.of("02:00:00:00:00:01", ["10.88.0.2"])
        doorbell = Doorbell(reactor, number, sleeping, lambda: None)
        doorbell.listen()
        steps: list[tuple[str, bool]] = []
        remove, close, own = reactor.removeReader, os.close, threading.current_thread()

        def removing(reader: IReadDescriptor) -> None:
            if reader is doorbell:
                steps.append(("removed", threading.current_thread() is own))
            remove(reader)

        def closing(descriptor: int) -> None:
            if descriptor == number:
                steps.append(("closed", threading.current_thread() is own))
            close(descriptor)

        self.patch(reactor, "removeReader", removing)
        self.patch(os, "close", closing)
        released = mock.Mock()
        slumber = Slumber(mock.Mock(), doorbell, release_volumes=released)
        await slumber.close(reactor)
        self.assertEqual(steps, [("removed", True), ("closed", False)])
        self.assertTrue(released.called)
        await slumber.close(reactor)
        self.assertEqual(len(steps), 2)
