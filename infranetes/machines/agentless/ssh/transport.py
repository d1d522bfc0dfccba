# SPDX-License-Identifier: Apache-2.0
"""One SSH transport to a guest: its algorithms, its host key, and bounds on what its server sends.

Conch has neither a bound on the messages of one turn of the reactor, nor on answers to a server that doesn't
read them, and an error in a message is a traceback in the log. Here they end the transport, or hold it up.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import attrs
from twisted.conch.error import ConchError
from twisted.conch.ssh.keys import Key
from twisted.conch.ssh.service import SSHService
from twisted.conch.ssh.transport import SSHClientTransport
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IConsumer, IDelayedCall, IPushProducer, IReactorTime, ITCPTransport
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.machines.agentless.ssh.keys import fingerprint, key_type
from infranetes_common.concurrency import Event, Notifier
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable

TURN_SECONDS = 0.005  # for which messages are handled before other work has its turn
LINGER_SECONDS = 1.0  # for the other side to take our last message
MAX_BANNER = 4096  # bytes before the server's version, and of that
MAX_PACKET = 64 * 1024  # bytes; data comes in 32 KiB, as we ask for
MAX_TEXT = 200  # characters of the server's that are shown to people

# Diffie-Hellman in groups of the server's choice is left out: a prime of a MiB would take hours.
_EXCHANGES = (
    b"curve25519-sha256", b"curve25519-sha256@libssh.org", b"ecdh-sha2-nistp256", b"ecdh-sha2-nistp384",
    b"ecdh-sha2-nistp521", b"diffie-hellman-group14-sha1",
)  # fmt: skip
_CIPHERS = (b"aes128-ctr", b"aes256-ctr", b"aes192-ctr")
_MACS = (b"hmac-sha2-256", b"hmac-sha2-512", b"hmac-sha1")
_KEYS = (
    b"ssh-ed25519", b"ecdsa-sha2-nistp256", b"ecdsa-sha2-nistp384", b"ecdsa-sha2-nistp521", b"rsa-sha2-512",
    b"rsa-sha2-256", b"ssh-rsa",
)  # fmt: skip


class Silent(Logger):
    """A logger for Conch, which writes several lines for each command. What matters is told by errors."""

    def emit(self, level: LogLevel, format: str | None = None, **kwargs: object) -> None:
        return


def shown(text: bytes) -> str:
    """Return a text of the server's that may be shown to people."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT].decode(errors="replace"))


@attrs.frozen
class Identity:
    """Who connects, and to whom.

    :ivar key: the user's private key. :ivar host_key: of the guest's server, as SSH sends it; b"": any, and
        the caller looks at it afterwards.
    """

    user: str
    key: Key = attrs.field(repr=False)
    host_key: bytes = b""


class _Connected(ITCPTransport, IPushProducer, IConsumer):
    """What Twisted's TCP connections are."""


@implementer(IPushProducer)
class Transport(SSHClientTransport):
    """One SSH transport. It asks for `first_service` once its server has proved to have its host key.

    :ivar over: fails with the reason once the transport is lost. :ivar reason: that.
    :ivar host_key: the server's, proved once `first_service` starts.
    :ivar server: the server's version, such as "OpenSSH_9.2p1".
    """

    transport: _Connected
    _log = Silent()
    ourVersionString = b"SSH-2.0-Infranetes"

    def __init__(self, reactor: IReactorTime, identity: Identity, first_service: SSHService) -> None:
        self._reactor = reactor
        self._identity = identity
        self._first_service = first_service
        self.supportedKeyExchanges = [
            exchange for exchange in _EXCHANGES if exchange in self.supportedKeyExchanges
        ]
        self.supportedCiphers = [cipher for cipher in _CIPHERS if cipher in self.supportedCiphers]
        self.supportedMACs = list(_MACS)
        self.supportedCompressions = [b"none"]
        self.supportedPublicKeys = list(_algorithms(identity.host_key))
        self.host_key = b""
        self.server = ""
        self.over: Event[None] = Event()
        self.reason: InfranetesError | None = None
        self._secure = False
        self._broken = False  # nothing that still comes is looked at
        self._full = False  # the kernel takes no more
        self._later: IDelayedCall | None = None
        self._clear = Notifier()

    # The end

    def break_off(self, error: InfranetesError, gently: bool = False) -> None:
        """End the transport for this reason. Idempotent. :param gently: what is written is sent first."""
        if self._broken:
            return
        self._end(error)
        self.transport.unregisterProducer()
        if gently:
            self.transport.loseConnection()
            self._later = self._reactor.callLater(LINGER_SECONDS, self._abort)
        else:
            self.transport.abortConnection()

    def give_up(self, error: InfranetesError) -> None:
        """End the transport, which may not have been connected. Idempotent."""
        if self.connected:
            self.break_off(error)
        else:
            self._end(error)

    def _end(self, error: InfranetesError) -> None:
        self._broken = True
        self._stop_later()
        if self.reason is None:
            self.reason = error
            self.over.fail(error)
        self._clear.notify()

    def _abort(self) -> None:
        self._later = None
        self.transport.abortConnection()

    def _stop_later(self) -> None:
        later, self._later = self._later, None
        if later is not None:
            later.cancel()

    def connectionLost(self, reason: Failure | None = None) -> None:
        if reason is None or reason.check(ConnectionDone):
            self._end(Unavailable("its SSH server closed the connection"))
        else:
            self._end(Unavailable(f"the connection to its SSH server was lost: {reason.getErrorMessage()}"))
        if self.service is not None:
            self.service.serviceStopped()
            self.service = None

    def ssh_SERVICE_ACCEPT(self, packet: bytes) -> None:
        if self.service is not None:
            raise ConchError("a service that was not asked for")
        super().ssh_SERVICE_ACCEPT(packet)

    def sendDisconnect(self, reason: int, desc: bytes) -> None:
        """End the transport, since the other side is not as it should be. Called by Conch."""
        if not self._broken:
            self._tell(reason, desc)
            why = "it shares no algorithms with the node" if b"kex parts" in desc else shown(desc)
            self.break_off(Unavailable(f"its SSH server can't be spoken to: {why}"), gently=True)

    def _tell(self, reason: int, text: bytes) -> None:
        payload = struct.pack(">LL", reason, len(text)) + text + bytes(4)
        self.sendPacket(1, payload)

    def close(self) -> None:
        """End the transport as one that is no longer needed. Idempotent."""
        if not self._broken:
            self._tell(11, b"")
            self.break_off(Unavailable("the node closed its connection to the guest"), gently=True)

    def receiveError(self, reasonCode: int, description: bytes) -> None:
        self.break_off(Unavailable(f"its SSH server ended the connection: {shown(description)}"))

    # What is received

    def connectionMade(self) -> None:
        self.transport.registerProducer(self, True)
        self.transport.setTcpNoDelay(True)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        if not self._broken:
            self.buf += data
            self._handle()

    def _handle(self) -> None:
        """Handle what has arrived, for a moment."""
        until = time.monotonic() + TURN_SECONDS
        try:
            while not self._broken and self._handle_one():
                if time.monotonic() > until and self._later is None and not self._broken:
                    self.transport.pauseProducing()
                    self._later = self._reactor.callLater(0, self._continue)
                    return
        except Exception as error:  # whatever Conch makes of a message that is none
            self.break_off(
                Unavailable(f"its SSH server sent a message that is none ({type(error).__name__})")
            )

    def _continue(self) -> None:
        self._later = None
        self._handle()
        if self._later is None and not self._broken and not self._full:
            self.transport.resumeProducing()

    def _handle_one(self) -> bool:
        """Handle the next message; return whether there was one."""
        if not self.gotVersion:
            return self._read_version()
        packet = self.getPacket()
        if packet is None:
            first = getattr(self, "first", b"")
            if len(first) >= 4 and int.from_bytes(first[:4], "big") > MAX_PACKET:
                self.break_off(Unavailable("its SSH server sent a message that is too long"))
            return False
        self.dispatchMessage(packet[0], packet[1:])
        return True

    def _read_version(self) -> bool:
        line, newline, rest = self.buf.partition(b"\n")
        self._banner += len(line) + 1
        if self._banner > MAX_BANNER:
            self.break_off(Unavailable("what answers at its SSH port is no SSH server"))
            return False
        if not newline:
            self._banner -= len(line) + 1
            return False
        self.buf = rest
        if line.startswith(b"SSH-"):
            self.otherVersionString = line.rstrip(b"\r")
            if not line.startswith((b"SSH-2.0-", b"SSH-1.99-")):
                self.break_off(Unavailable(f"its SSH server is too old: {shown(line)}"))
                return False
            self.gotVersion = True
            self.server = shown(self.otherVersionString.split(b"-", 2)[2])
        return True

    _banner = 0  # bytes

    # What is sent

    @property
    def is_clear(self) -> bool:
        """Whether more may be sent now: the kernel takes it, and no keys are exchanged."""
        return not self._full and self._keyExchangeState == self._KEY_EXCHANGE_NONE

    async def clear(self) -> None:
        """Wait until more may be sent. :raise Unavailable: the transport is lost."""
        while not self.is_clear and not self._broken:
            await self._clear.wait()
        if self._broken:
            await self.over.wait()

    def pauseProducing(self) -> None:
        # Whoever does not read what we answer is not listened to either, or the answers would pile up.
        self._full = True
        self.transport.pauseProducing()

    def resumeProducing(self) -> None:
        self._full = False
        if self._later is None and not self._broken:
            self.transport.resumeProducing()
        self._clear.notify()

    def stopProducing(self) -> None:
        self.resumeProducing()

    def _newKeys(self) -> None:
        super()._newKeys()
        self._clear.notify()

    # The host key

    def verifyHostKey(self, hostKey: bytes, fingerprint: bytes) -> Deferred[bool]:
        expected = self.host_key or self._identity.host_key
        if expected and hostKey != expected:
            self.break_off(another_key(expected, hostKey))
            return fail(FailedPrecondition("another host key"))
        self.host_key = hostKey
        return succeed(True)

    def connectionSecure(self) -> None:
        if not self._secure:  # else keys were exchanged anew
            self._secure = True
            self.requestService(self._first_service)


def another_key(expected: bytes, presented: bytes) -> FailedPrecondition:
    """Return the error of a server that is not the one that it should be."""
    return FailedPrecondition(
        f"its SSH server has another host key ({shown(key_type(presented))} {fingerprint(presented)}) "
        f"than the guest ({shown(key_type(expected))} {fingerprint(expected)}): the guest has changed it, "
        "or another machine answers in its place. Recreate the pod"
    )


def _algorithms(host_key: bytes) -> Sequence[bytes]:
    """Return by which algorithms a server may prove that it has this key; b"": any key."""
    kind = key_type(host_key)
    if not host_key:
        return _KEYS
    return _KEYS[-3:] if kind == b"ssh-rsa" else (kind,)
