# SPDX-License-Identifier: Apache-2.0
"""What the daemon has of a VM that sleeps is given back without a pause of the reactor, and in its thread."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from twisted.internet.interfaces import IReadDescriptor
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.sleep.doorbell import Doorbell
from infranetes.providers.qemu.sleep.frames import Sleeping
from infranetes.providers.qemu.sleep.record import Stage
from infranetes.providers.qemu.sleep.slumber import Slumber
from infranetes_common.reactors import installed
from tests.infranetes.providers.qemu.sleep.test_record import RECORD

reactor = installed()


def slumber(stage: Stage, **more: Any) -> Slumber:
    return Slumber(attrs.evolve(RECORD, stage=stage), **more)


class StageTests(TestCase):
    def test_only_between_being_saved_and_going_on_it_is_asleep(self) -> None:
        asleep = {stage for stage in Stage if slumber(stage).asleep}
        self.assertEqual(asleep, {Stage.ASLEEP})

    def test_its_volumes_are_known_by_their_serials(self) -> None:
        self.assertEqual(slumber(Stage.ASLEEP).serials, {"serial"})


class HeldTests(TestCase):
    async def test_the_files_that_its_next_process_would_inherit_are_closed_once(self) -> None:
        held = OpenFiles()
        held.open(5, Path("/dev/null"))
        [descriptor] = held.by_number().values()
        its = slumber(Stage.ASLEEP, held=held)
        await its.close(reactor)
        self.assertRaises(OSError, os.fstat, descriptor)
        other = os.open("/dev/null", os.O_RDONLY)  # which gets the same number
        await its.close(reactor)
        os.close(other)
        self.assertIsNone(its.held)


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
