# SPDX-License-Identifier: Apache-2.0
"""The daemon listens at the tap of a VM that sleeps: one end of a pair of sockets stands in for it."""

from __future__ import annotations

import os
import socket
from typing import cast

from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.sleep.doorbell import _AT_A_TIME, AGAIN_SECONDS, Doorbell
from infranetes.providers.qemu.sleep.frames import Sleeping
from infranetes_common.reactors import IReactor
from tests.infranetes.providers.qemu.sleep.test_frames import MAC, NOBODY, OTHER, OURS, arp, ip

HEADER = bytes(10)


class Reactor(Clock):
    """A clock that knows who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[IReadDescriptor] = []
        self.added = 0

    def addReader(self, reader: IReadDescriptor) -> None:
        self.readers.append(reader)
        self.added += 1

    def removeReader(self, reader: IReadDescriptor) -> None:
        self.readers.remove(reader)


class DoorbellTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = Reactor()
        ours, self.network = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for each in (ours, self.network):
            each.setblocking(False)
        self.addCleanup(self.network.close)
        self.descriptor = ours.detach()
        self.calls = 0
        sleeping = Sleeping.of("0a:58:0a:00:00:02", ["10.0.0.2"])
        self.doorbell = Doorbell(cast(IReactor, self.reactor), self.descriptor, sleeping, self.called)
        self.addCleanup(self.doorbell.thd_close)
        self.doorbell.listen()

    def called(self) -> None:
        self.calls += 1

    def send(self, *frames: bytes) -> None:
        """Have frames come, and the reactor notice them, once."""
        for frame in frames:
            self.network.send(HEADER + frame)
        for reader in self.reactor.readers:
            reader.doRead()

    def answers(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.network.recv(2000))
            except BlockingIOError:
                return found

    @property
    def listening(self) -> bool:
        return self.reactor.readers == [self.doorbell]

    def test_a_question_is_answered_and_calls_nobody(self) -> None:
        self.send(arp(NOBODY), arp(OURS))
        (answer,) = self.answers()
        self.assertEqual(answer[10:16], OTHER)
        self.assertEqual((self.calls, self.listening), (0, True))

    def test_after_a_call_what_comes_waits_for_the_vm(self) -> None:
        self.send(ip(MAC), arp(OURS), ip(MAC))
        self.assertEqual((self.calls, self.listening, self.answers()), (1, False, []))
        self.assertEqual(os.read(self.descriptor, 2000), HEADER + arp(OURS))

    def test_a_call_that_has_not_woken_the_vm_is_made_again_after_a_while(self) -> None:
        self.send(ip(MAC), ip(MAC))
        self.reactor.advance(AGAIN_SECONDS - 0.1)
        self.assertFalse(self.listening)
        self.reactor.advance(0.2)
        self.assertTrue(self.listening)
        self.send()
        self.assertEqual(self.calls, 2)

    def test_whoever_is_called_may_rest_or_listen_at_once(self) -> None:
        self.doorbell._called = self.doorbell.rest
        self.send(ip(MAC))
        self.reactor.advance(2 * AGAIN_SECONDS)
        self.assertFalse(self.listening, "the VM has its tap by then")

    def test_who_listens_or_rests_twice_does_so_once(self) -> None:
        self.doorbell.listen()
        self.assertEqual((self.reactor.added, self.listening), (1, True))
        for _ in range(2):
            self.doorbell.rest()
        self.assertFalse(self.listening)
        self.doorbell.listen()
        self.assertTrue(self.listening)

    def test_who_rests_or_listens_after_a_call_is_not_disturbed_by_it_later(self) -> None:
        for listens in (False, True):
            self.setUp()
            self.send(ip(MAC))
            self.doorbell.listen() if listens else self.doorbell.rest()
            self.assertEqual(self.reactor.getDelayedCalls(), [])
            self.reactor.advance(2 * AGAIN_SECONDS)
            self.assertEqual(self.listening, listens)

    def test_very_many_frames_take_several_turns(self) -> None:
        self.network.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.send(*[arp(OURS)] * (_AT_A_TIME // 2))
        self.assertEqual(len(self.answers()), _AT_A_TIME // 2)
        self.patch(os, "read", lambda descriptor, most: HEADER + arp(OURS))  # there are always more
        sent: list[bytes] = []
        self.patch(os, "write", lambda descriptor, data: sent.append(data))
        self.doorbell.doRead()
        self.assertEqual(len(sent), _AT_A_TIME)

    def test_an_answer_that_the_tap_does_not_take_is_lost(self) -> None:
        def full(descriptor: int, data: bytes) -> int:
            raise OSError("the queue is full")

        self.patch(os, "write", full)
        self.send(arp(OURS))
        self.assertTrue(self.listening)

    def test_a_tap_that_is_down_for_a_moment_is_listened_to_on(self) -> None:
        def down(descriptor: int, most: int) -> bytes:
            raise OSError(77, "File descriptor in bad state")

        patch = self.patch(os, "read", down)
        self.doorbell.doRead()
        patch.restore()
        self.send(ip(MAC))
        self.assertEqual(self.calls, 1)

    def test_a_duplicate_is_another_descriptor_which_outlives_it(self) -> None:
        other = self.doorbell.duplicate()
        self.addCleanup(os.close, other)
        self.doorbell.rest()
        for _ in range(2):
            self.doorbell.thd_close()
        self.assertRaises(OSError, os.fstat, self.descriptor)
        self.network.send(b"x")
        self.assertEqual(os.read(other, 10), b"x")
        self.doorbell.listen()
        self.assertFalse(self.listening, "there is no tap any more")
