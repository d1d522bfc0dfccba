# SPDX-License-Identifier: Apache-2.0
"""Shell: a session in the machine itself, for the node's operators. The node decides who they are."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from twisted.internet.defer import Deferred

from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentShellRpcs
from txgrpc import Call
from vmserver import validate
from vmserver.containers import shell
from vmserver.containers.interface import ISession
from vmserver.rpc.quota import Quota
from vmserver.rpc.sessions import AHEAD_BYTES, serve, streams

MAX_SHELLS = 8  # not counted as sessions in containers, so that those never keep an operator out
_TERM = re.compile(r"[0-9A-Za-z+._-]{0,64}")


class ShellCalls(AgentShellRpcs):
    """Runs shells in the machine.

    :ivar shells: limits how many run at a time.
    """

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self.shells = Quota(MAX_SHELLS, "shells of the machine are open")

    def Shell(
        self, requests: AsyncIterator[messages.SessionInput], call: Call
    ) -> AsyncIterator[messages.SessionOutput]:
        call.receive_ahead(AHEAD_BYTES)
        return serve(self._reactor, self.shells, requests, self._begin)

    def _begin(self, start: messages.SessionStart) -> Deferred[ISession]:
        if not _TERM.fullmatch(start.term):
            raise InvalidArgument(f"term {start.term[:80]!r}: expected up to 64 of 0-9, A-Z, a-z and +._-")
        command = validate.command(start.command) if start.command else []
        return shell.open_shell(self._reactor, command, streams(start), start.term)
