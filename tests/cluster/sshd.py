# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cluster.sshd NAME`: as much of a node's sshd and systemd as Kubernetes' suite uses.

NAME is the cluster's. Users who have the key run commands on the first node, as root; `systemctl` is that of
`tests.cluster.systemctl`, and there is no sudo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from twisted.conch.avatar import ConchUser
from twisted.conch.checkers import InMemorySSHKeyDB, SSHPublicKeyChecker
from twisted.conch.error import ConchError
from twisted.conch.interfaces import IConchUser, ISession
from twisted.conch.ssh.factory import SSHFactory
from twisted.conch.ssh.keys import Key
from twisted.conch.ssh.session import SSHSession
from twisted.cred.portal import IRealm, Portal
from twisted.internet import reactor as the_reactor
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IProcessProtocol, IProcessTransport, IReactorProcess
from twisted.internet.protocol import ProcessProtocol
from twisted.python.components import registerAdapter
from zope.interface import implementer

from tests.cluster.components import SSH_USER
from tests.cluster.nodes import address_of
from tests.cluster.paths import Paths

PORT = 22
_SHELL = "/bin/sh"


def make_key(path: Path) -> Key:
    """Make a new key, and write its private half to `path`."""
    private = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(private)
    key: Key = Key.fromString(private)
    return key


def make_commands(directory: Path, cluster: str) -> None:
    """Write the commands that a node has and this machine lacks."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, body in (
        ("systemctl", f"exec '{sys.executable}' -m tests.cluster.systemctl '{cluster}' \"$@\""),
        ("sudo", 'echo "sudo: command not found" >&2; exit 127'),
    ):
        path = directory / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o700)


class User(ConchUser):
    """A user who has shown the key. `run`: runs a command, and connects it to the protocol."""

    def __init__(self, run: Callable[[ProcessProtocol, str], IProcessTransport]) -> None:
        super().__init__()
        self.run = run
        self.channelLookup[b"session"] = SSHSession


@implementer(ISession)
class Commands:
    """A session of a user, for one command without a terminal."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._process: IProcessTransport | None = None

    def execCommand(self, proto: ProcessProtocol, command: bytes) -> None:
        self._process = self._user.run(proto, command.decode())

    def getPty(self, term: bytes, windowSize: tuple[int, int, int, int], modes: object) -> None:
        raise ConchError("there are no terminals")

    def openShell(self, proto: IProcessProtocol) -> None:
        raise ConchError("there is no shell: say a command")

    def windowChanged(self, newWindowSize: tuple[int, int, int, int]) -> None:
        pass

    def eofReceived(self) -> None:
        if self._process is not None:
            self._process.closeStdin()

    def closed(self) -> None:
        pass  # a command that still runs goes on, as with sshd


registerAdapter(Commands, User, ISession)


@implementer(IRealm)
class Node:
    """The node on which commands run. `commands`: the directory in which they are looked up first."""

    def __init__(self, reactor: IReactorProcess, commands: Path) -> None:
        self._reactor = reactor
        self._environment = {**os.environ, "PATH": f"{commands}:{os.environ.get('PATH', os.defpath)}"}

    def requestAvatar(
        self, avatarId: object, mind: object, *interfaces: object
    ) -> tuple[type[IConchUser], User, Callable[[], None]]:
        return IConchUser, User(self._run), lambda: None

    def _run(self, proto: ProcessProtocol, command: str) -> IProcessTransport:
        return self._reactor.spawnProcess(proto, _SHELL, [_SHELL, "-c", command], env=self._environment)


class Server(SSHFactory):
    """Runs commands on the node for users who have the key `client`. `host`: the server's own key."""

    def __init__(self, node: Node, host: Key, client: Key) -> None:
        self.privateKeys = {host.sshType(): host}
        self.publicKeys = {host.sshType(): host.public()}
        trusted = InMemorySSHKeyDB({SSH_USER.encode(): [client.public()]})
        self.portal = Portal(node, [SSHPublicKeyChecker(trusted)])


def main(arguments: Sequence[str]) -> None:
    """Run the program."""
    (name,) = arguments
    key = Paths(name).ssh_key
    commands = key.parent / "commands"
    make_commands(commands, name)
    host = make_key(key.with_name("host_key"))
    server = Server(Node(the_reactor, commands), host, make_key(key))
    TCP4ServerEndpoint(the_reactor, PORT, interface=address_of(1)).listen(server)
    the_reactor.run()


if __name__ == "__main__":
    main(sys.argv[1:])
