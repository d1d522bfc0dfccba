# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a transport, if that can be said at all."""

from __future__ import annotations

import os
import socket

from twisted.internet.interfaces import ISystemHandle
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from txgrpc.peers import PeerCredentials, credentials_of


@implementer(ISystemHandle)
class Transport:
    """A transport of this handle."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def getHandle(self) -> object:
        return self._handle


class PeerTests(SynchronousTestCase):
    def test_a_unix_socket_has_its_process(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            own = PeerCredentials(os.getpid(), os.getuid(), os.getgid())
            self.assertEqual(credentials_of(Transport(ours)), own)

    def test_others_have_none(self) -> None:
        lost, theirs = socket.socketpair()
        for each in (lost, theirs):
            each.close()
        with socket.socket() as tcp:
            for transport in (
                Transport(tcp),
                Transport(lost),
                Transport(object()),
                Transport(None),
                object(),
            ):
                self.assertIsNone(credentials_of(transport), transport)
