# SPDX-License-Identifier: Apache-2.0
"""The hostile agent's process: it serves the port of one VM with that VM's identity.

Its only argument is a JSON object: `identity` (a document), `port` (on loopback), `containers` (ids). Each
line of standard input is a JSON object that replaces the attacks in force: their names by method, and perhaps
a `corpus` of messages in base64 by method. It then cuts all connections, and confirms that by a line on
standard output.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import connectionDone
from twisted.internet.stdio import StandardIO
from twisted.internet.task import react
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from infranetes_common import errors
from infranetes_common.concurrency import start
from infranetes_common.identity import decode
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver
from tests.support.hostile.agent import HostileAgent
from tests.support.hostile.attacks import ATTACKS
from txgrpc import Limits, Server, Service
from vmserver.identity import tls


class Control(LineOnlyReceiver):
    """Takes commands on standard input."""

    delimiter = b"\n"
    MAX_LENGTH = 64 * 1024 * 1024

    def __init__(self, agent: HostileAgent, tls_factory: tls.BoundedTLSFactory, over: Deferred[None]) -> None:
        self._agent = agent
        self._tls_factory = tls_factory
        self._over = over

    def lineReceived(self, line: bytes) -> None:
        command = json.loads(line)
        corpus = command.pop("corpus", {})
        self._agent.corpus = {
            method: itertools.cycle([base64.b64decode(one) for one in found])
            for method, found in corpus.items()
        }
        self._agent.attacks = {method: ATTACKS[method, name] for method, name in command.items()}
        self._tls_factory.abort_all()
        self.sendLine(b"done")

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._over.callback(None)


async def run(reactor: IReactor, given: Mapping[str, Any]) -> None:
    """Serve until standard input ends.

    :param given: the argument.  Any: JSON
    """
    identity = decode(given["identity"].encode())
    agent = HostileAgent(identity.sandbox_id, tuple(given["containers"]))
    limits = Limits(max_receive_message=64 * 1024 * 1024)
    server = Server(reactor, [Service(vmserver.Agent, agent)], limits=limits, translate_error=errors.to_grpc)
    tls_factory = tls.BoundedTLSFactory(reactor, tls.context(identity), server.factory)
    over: Deferred[None] = Deferred()
    await TCP4ServerEndpoint(reactor, given["port"], interface="127.0.0.1").listen(tls_factory)
    control = Control(agent, tls_factory, over)
    StandardIO(control)
    control.sendLine(b"ready")
    await over


if __name__ == "__main__":
    react(lambda reactor: start(run(reactor, json.loads(sys.argv[1]))))
