# SPDX-License-Identifier: Apache-2.0
"""Shells of the machine itself, beside its containers: processes that begin and end with a session."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from collections.abc import Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes_common.commands import PATH
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.processes import kill_family
from infranetes_common.reactors import IReactor
from vmserver.containers.child_sessions import ExecSession
from vmserver.containers.interface import ISession, Streams

FALLBACK = "/bin/sh"
_NO_SHELLS = ("nologin", "false", "true", "sync")  # the shells of users who may not log in
_OOM_SCORE_ADJ = 0  # in place of the agent's own score, which protects it

# setpriv has the kernel end the shell together with the agent. Busybox's setpriv can't.
_WITH_THE_AGENT = 'setpriv --pdeathsig KILL true 2>/dev/null && set -- setpriv --pdeathsig KILL "$@"\n'
# All processes of a shell are found by their session. With a terminal, Twisted makes a session itself.
_IN_A_SESSION = 'command -v setsid >/dev/null && set -- setsid "$@"\n'
_log = Logger()


@attrs.frozen
class Account:
    """The account that runs the agent: root, if the agent has a machine to itself."""

    name: str
    home: str
    shell: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a shell, as after a login."""
        return {
            "PATH": PATH,
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "SHELL": self.shell,
        }


def own_account() -> Account:
    """Return this process's account, with a shell that exists. Blocks."""
    uid = os.geteuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(str(uid), "/", FALLBACK)
    home = entry.pw_dir if os.path.isdir(entry.pw_dir) else "/"
    usable = os.path.basename(entry.pw_shell) not in _NO_SHELLS and os.access(entry.pw_shell, os.X_OK)
    return Account(entry.pw_name, home, entry.pw_shell if usable else FALLBACK)


class ShellSession(ExecSession):
    """A shell, or a command, as a child of this process that leads a session (setsid(2))."""

    def kill(self) -> None:
        """Kill the shell, its descendants, and the other processes of its session."""
        kill_family(self._pid)
        start(run_in_thread(self._reactor, kill_session, self._pid)).addErrback(
            lambda failure: _log.failure("processes of a shell's session may still be running", failure)
        )


def kill_session(leader: int) -> None:
    """SIGKILL every process of the session that `leader` led, but not of init's, or of this process's own.

    Blocks: it looks at all processes."""
    if leader <= 1 or leader == os.getsid(0):
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def open_shell(reactor: IReactor, command: Sequence[str], streams: Streams, term: str) -> Deferred[ISession]:
    """Start a command, or with none a login shell.

    :param term: for $TERM. If the Deferred is cancelled, nothing is started."""
    return start(_open(reactor, command, streams, term))


async def _open(reactor: IReactor, command: Sequence[str], streams: Streams, term: str) -> ISession:
    account = await run_in_thread(reactor, own_account)
    environment = account.environment | ({"TERM": term} if term else {})
    script = _WITH_THE_AGENT + ("" if streams.tty else _IN_A_SESSION) + 'exec "$@"'
    run = ["/bin/sh", "-c", script, "sh", *(command or [account.shell, "-l"])]
    session: ISession = ShellSession.spawn(reactor, run, environment, account.home, _OOM_SCORE_ADJ, streams)
    return session
