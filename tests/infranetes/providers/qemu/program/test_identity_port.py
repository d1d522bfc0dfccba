# SPDX-License-Identifier: Apache-2.0
"""The channel that gives an agent its identity."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.program import identity_port
from infranetes.providers.qemu.program.identity_port import Failed, IdentityPort, Ready, Waiting
from infranetes_common.errors import InfranetesError, Unavailable

TOKEN = "0123456789abcdef" * 2


class IdentityPortTests(SynchronousTestCase):
    """The agent's port."""

    def test_lines(self) -> None:
        for line, said in (
            (b"waiting", Waiting()),
            (b"ready 2475\r", Ready(2475)),
            (b"failed no such card", Failed("no such card")),
            (b"failed", Failed("no reason given")),
            (b"ready 0", Ready(0)),
            (b"ready 00", None),
            (b"ready -1", None),
            (b"ready 65536", None),
            (b"ready 99999999999999999999", None),
            (b"ready x", None),
            (b"ready 2475junk", None),
            (b"ready 2475 1", None),
            (b"ready 000024750000", None),
            ("ready \u0662\u0664\u0667\u0665".encode(), None),
            (b"ready " + b"1" * 4000, None),
            (b"", None),
            (b"\xff\xfe", None),
        ):
            self.assertEqual(identity_port.parse(line), said)

    def connected(self) -> IdentityPort:
        port = IdentityPort()
        port.makeConnection(StringTransport())
        return port

    def test_stale_lines_before_the_answer_do_no_harm(self) -> None:
        port = self.connected()
        for piece in (b"ting\nwaiting\n", b"waiting\nready 24", b"75\nready 1\n"):
            port.dataReceived(piece)
        self.successResultOf(port.waiting.wait())
        self.assertEqual(self.successResultOf(port.ready.wait()), 2475)

    def test_a_refusal_has_the_agents_words(self) -> None:
        port = self.connected()
        port.dataReceived(b"failed the clock can't be set\n")
        self.assertIn(
            "the clock can't be set", str(self.failureResultOf(port.ready.wait(), InfranetesError).value)
        )

    def test_endless_noise_takes_no_memory(self) -> None:
        port = self.connected()
        for _ in range(100):
            port.dataReceived(b"x" * 10000)
        self.assertLess(len(port._buffer), 20000)
        port.dataReceived(b"\nready 2475\n")
        self.assertEqual(self.successResultOf(port.ready.wait()), 2475)

    def test_an_end_without_answer_is_told(self) -> None:
        port = self.connected()
        port.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(port.ready.wait(), Unavailable)
