# SPDX-License-Identifier: Apache-2.0
"""What the process that makes layers' disks may tell the daemon: hostile layers are read in it."""

from __future__ import annotations

import socket

from twisted.internet.error import ProcessDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.erofs.process import MAX_LINE, _Process
from infranetes_common.errors import InfranetesError
from tests.support.peak import peak


class FakeTransport:
    """Notes the signals. :ivar signals: their names."""

    def __init__(self) -> None:
        self.signals: list[str] = []

    def signalProcess(self, signal: str) -> None:
        self.signals.append(signal)


class AnswersTests(SynchronousTestCase):
    def test_a_process_that_talks_nonsense_is_killed_and_fails_what_it_was_to_do(self) -> None:
        endless = [b"x" * 65536] * 100
        for said in (endless, [b"hello\n"], [b"[]\n"], [b'{"order": 9, "code": 0, "said": ""}\n'],
                     [b'{"order": 1, "code": [], "said": ""}\n'], [b"[" * 60000 + b"\n"]):  # fmt: skip
            ours, theirs = socket.socketpair()
            self.addCleanup(theirs.close)
            process, transport = _Process(ours), FakeTransport()
            process.transport = transport  # type: ignore[assignment]
            _, ended = process.begin()
            waiting = ended.wait()

            def tell(pieces: list[bytes] = said, to: _Process = process) -> None:
                for piece in pieces:
                    to.outReceived(piece)

            self.assertLess(peak(tell), 1 << 20)
            self.assertEqual(set(transport.signals), {"KILL"}, said[0][:40])
            process.processEnded(Failure(ProcessDone(0)))
            self.failureResultOf(waiting, InfranetesError)
        self.assertGreater(MAX_LINE, 12_000, "the longest honest answer")
