# SPDX-License-Identifier: Apache-2.0
"""The two services of an SSH transport: the user is authenticated, and then channels are opened."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol, cast

from twisted.conch.error import ConchError
from twisted.conch.ssh import connection, userauth
from twisted.conch.ssh.channel import SSHChannel
from twisted.conch.ssh.common import NS, getNS
from twisted.conch.ssh.service import SSHService

from infranetes.machines.agentless.ssh.transport import Identity, Silent, Transport, shown
from infranetes_common.concurrency import Event
from infranetes_common.errors import FailedPrecondition, Unavailable

MAX_UNASKED = 16  # channels that a server tries to open before its connection is given up
MAX_DATA = 32 * 1024  # bytes of one message
LEAST_DATA = 512  # that a server has to take at a time


class Authentication(SSHService):
    """Authenticates the node's user by its key, and by nothing else, and starts the connection."""

    name = b"ssh-userauth"
    protocolMessages = userauth.SSHUserAuthClient.protocolMessages
    _log = Silent()
    transport: Transport

    def __init__(self, identity: Identity, connection: Connection) -> None:
        self._identity = identity
        self._connection = connection

    def serviceStarted(self) -> None:
        key, user = self._identity.key, self._identity.user.encode()
        request = b"".join(
            (NS(user), NS(connection.SSHConnection.name), NS(b"publickey"), b"\1", NS(key.sshType()))
        ) + NS(key.blob())
        signed = NS(self.transport.sessionID or b"") + bytes((userauth.MSG_USERAUTH_REQUEST,)) + request
        self.transport.sendPacket(userauth.MSG_USERAUTH_REQUEST, request + NS(key.sign(signed)))

    def ssh_USERAUTH_SUCCESS(self, packet: bytes) -> None:
        self.transport.setService(self._connection)

    def ssh_USERAUTH_FAILURE(self, packet: bytes) -> None:
        ways = shown(getNS(packet)[0])
        self.transport.break_off(
            Unavailable(
                f"its SSH server does not let {self._identity.user} in by the node's key (it takes: {ways}); "
                "a guest that is booting may not have it yet"
            )
        )

    def ssh_USERAUTH_BANNER(self, packet: bytes) -> None:
        """Ignore what is shown before a login."""

    def packetReceived(self, messageNum: int, packet: bytes) -> None:
        if messageNum == userauth.MSG_USERAUTH_PK_OK:
            raise ConchError("an answer to a question that was not asked")
        super().packetReceived(messageNum, packet)


class Receiver(Protocol):
    """What the connection asks of a channel beside what Conch's have."""

    localWindowLeft: int
    localMaxPacket: int
    localClosed: int

    def arrived(self, stream: int, data: bytes) -> None:
        """Take data in. :param stream: 0, or the number of one beside it, such as stderr."""


class Connection(connection.SSHConnection):
    """An SSH connection: it opens channels, and lets the server open none.

    :ivar started: succeeds once the user is authenticated.
    :ivar emptied: called when its last channel is gone.
    """

    transport: Transport
    _log = Silent()

    def __init__(self) -> None:
        super().__init__()
        self.started: Event[None] = Event()
        self.emptied: Callable[[], None] = lambda: None
        self._unasked = 0

    def serviceStarted(self) -> None:
        super().serviceStarted()
        self.started.succeed(None)

    def ssh_CHANNEL_OPEN(self, packet: bytes) -> None:
        _, rest = getNS(packet)
        self._unasked += 1
        if self._unasked > MAX_UNASKED:
            self.transport.break_off(FailedPrecondition("its SSH server opens channels of its own"))
            return
        answer = rest[:4] + struct.pack(">L", connection.OPEN_ADMINISTRATIVELY_PROHIBITED)
        self.transport.sendPacket(connection.MSG_CHANNEL_OPEN_FAILURE, answer + NS(b"") + NS(b""))

    def channelClosed(self, channel: SSHChannel) -> None:
        super().channelClosed(channel)
        if not self.channels:
            self.emptied()

    def gotGlobalRequest(self, requestType: bytes, data: bytes) -> int:
        return 0  # such as keepalive@openssh.com: any answer will do

    def ssh_CHANNEL_OPEN_CONFIRMATION(self, packet: bytes) -> None:
        if struct.unpack(">L", packet[12:16])[0] < LEAST_DATA:
            raise ConchError("channels without room for data")
        self._check_opening(packet)
        super().ssh_CHANNEL_OPEN_CONFIRMATION(packet)

    def ssh_CHANNEL_OPEN_FAILURE(self, packet: bytes) -> None:
        self._check_opening(packet)
        super().ssh_CHANNEL_OPEN_FAILURE(packet)
        if not self.channels:
            self.emptied()

    def _check_opening(self, packet: bytes) -> None:
        (local,) = struct.unpack(">L", packet[:4])
        if local in self.localToRemoteChannel:
            raise ConchError("a channel that is open already")

    def ssh_CHANNEL_REQUEST(self, packet: bytes) -> None:
        (local,) = struct.unpack(">L", packet[:4])
        kind, rest = getNS(packet[4:])
        taken = self.channels[local].requestReceived(kind, rest[1:])
        if rest[0]:
            answer = connection.MSG_CHANNEL_SUCCESS if taken else connection.MSG_CHANNEL_FAILURE
            self.transport.sendPacket(answer, struct.pack(">L", self.localToRemoteChannel[local]))

    # Conch would let the server go on as soon as it has sent something, whether or not anybody has taken it.

    def ssh_CHANNEL_DATA(self, packet: bytes) -> None:
        (local,) = struct.unpack(">L", packet[:4])
        self._arrived(local, 0, packet[4:])

    def ssh_CHANNEL_EXTENDED_DATA(self, packet: bytes) -> None:
        local, stream = struct.unpack(">2L", packet[:8])
        self._arrived(local, stream or -1, packet[8:])

    def _arrived(self, local: int, stream: int, packet: bytes) -> None:
        (size,) = struct.unpack(">L", packet[:4])
        data = packet[4:]
        if size != len(data):
            raise ConchError("data that is cut off")
        channel = cast(Receiver, self.channels[local])
        if len(data) > min(channel.localWindowLeft, channel.localMaxPacket):
            raise ConchError("more data than there is room for")
        channel.localWindowLeft -= len(data)
        channel.arrived(stream, data)
