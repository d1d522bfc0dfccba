# SPDX-License-Identifier: Apache-2.0
"""How a command becomes the line that a guest's SSH server gives to a shell, and how it is killed."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from typing import Protocol

import attrs

from infranetes_common.errors import InvalidArgument, NotOffered

MAX_LINE = 128 * 1024  # bytes: what Linux' kernel takes as one argument of the shell, which the line is
_WINDOWS_LINE = 8191  # characters: cmd.exe's

_MARK = "INFRANETES_COMMAND"
# What the user's own shell is given, which may be any, is one command with quoted words.
_RUN = f'export {_MARK}="$1"; shift; exec "$@"'
_LOGIN = f'export {_MARK}="$1"; exec "${{SHELL:-/bin/sh}}" -l'
_KILL = f"""for each in $(grep -ls "{_MARK}=$1" /proc/[0-9]*/environ); do
    each=${{each#/proc/}}; kill -9 "${{each%/environ}}"; done"""


class Shell(Protocol):
    """How commands are given to a server.

    :ivar probe: a line that succeeds where commands run as they should. :ivar refused: what is wrong else.
    """

    @property
    def probe(self) -> str: ...

    @property
    def refused(self) -> str: ...

    def line(self, command: Sequence[str], mark: str) -> str:
        """Return the line that runs a command; empty: the login shell.

        :param mark: what `kill` finds its processes by. :raise InvalidArgument: it can't be run."""

    def kill(self, mark: str) -> str:
        """Return the line that kills all that a command has started; "": there is no such."""


@attrs.frozen
class PosixShell:
    """Of everything but Windows.

    :param sudo: commands run as root by sudo, which must not ask for a password.
    """

    sudo: bool = False

    @property
    def probe(self) -> str:
        return "sudo -n -- true" if self.sudo else "exit 0"

    @property
    def refused(self) -> str:
        return "its user may not run commands by sudo without a password" if self.sudo else "it runs nothing"

    def line(self, command: Sequence[str], mark: str) -> str:
        script = _RUN if command else _LOGIN
        line = self._as_root("/bin/sh", "-c", script, "sh", mark, *command)
        if "\0" in line:
            raise InvalidArgument("a command can't have NUL characters")
        if len(line.encode(errors="surrogateescape")) > MAX_LINE:
            raise InvalidArgument(
                f"argument list too long: with quotes the command has over {MAX_LINE} bytes; give it in a "
                "file or on the standard input"
            )
        return line

    def kill(self, mark: str) -> str:
        return self._as_root("/bin/sh", "-c", _KILL, "sh", mark)

    def _as_root(self, *command: str) -> str:
        return shlex.join(("sudo", "-n", "--", *command) if self.sudo else command)


@attrs.frozen
class WindowsShell:
    """Of Windows' OpenSSH, whose shell is cmd.exe unless its administrator has chosen another."""

    probe = "exit 0"
    refused = "it runs nothing"

    def line(self, command: Sequence[str], mark: str) -> str:
        if any(char in word for word in command for char in "\0\r\n"):
            raise InvalidArgument("a command for cmd.exe can't have line ends or NUL characters")
        # The program takes the line apart by one set of rules, cmd.exe before that by another.
        line = "".join(
            f"^{char}" if char in '()%!^"<>&|' else char for char in subprocess.list2cmdline(command)
        )
        if len(line) > _WINDOWS_LINE:
            raise InvalidArgument(f"argument list too long: cmd.exe takes {_WINDOWS_LINE} characters")
        return line

    def kill(self, mark: str) -> str:
        return ""


def shell_for(server: str, sudo: bool) -> Shell:
    """Return the shell of a server. :param server: its version. :param sudo: see `PosixShell`."""
    return WindowsShell() if "Windows" in server else PosixShell(sudo)


def check_posix(shell: Shell, what: str) -> None:
    """Check that the guest has a POSIX shell. :raise NotOffered: it does not; what can't be done is said."""
    if not isinstance(shell, PosixShell):
        raise NotOffered(f"{what} of a guest that is Windows can't be done by SSH")
