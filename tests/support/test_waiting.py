# SPDX-License-Identifier: Apache-2.0
"""What tests wait for."""

from __future__ import annotations

import socket
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.support.waiting import listens


class ListensTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.socket = socket.socket(socket.AF_UNIX)
        self.addCleanup(self.socket.close)

    def test_a_socket_listens_neither_before_it_is_made_nor_when_it_is_only_bound(self) -> None:
        self.assertFalse(listens(self.path))
        self.socket.bind(str(self.path))
        self.assertTrue(self.path.exists())
        self.assertFalse(listens(self.path))
        self.socket.listen(1)
        self.assertTrue(listens(self.path))

    def test_it_listens_while_others_wait_in_its_line(self) -> None:
        self.socket.bind(str(self.path))
        self.socket.listen(0)
        self.assertEqual([listens(self.path) for _ in range(3)], [True, True, True])
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for each in waiting:
            self.addCleanup(each.close)
            each.setblocking(False)
        for each in waiting:
            try:
                each.connect(str(self.path))
            except BlockingIOError:
                break
        self.assertTrue(listens(self.path))

    def test_what_a_killed_program_leaves_does_not_listen(self) -> None:
        self.socket.bind(str(self.path))
        self.socket.listen(1)
        self.socket.close()
        self.assertFalse(listens(self.path))
