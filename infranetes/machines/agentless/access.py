# SPDX-License-Identifier: Apache-2.0
"""A way into a guest that has no agent of ours: what runs commands in it, and brings files into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from zope.interface import Attribute, Interface

from infranetes.machines.sessions import SessionCall
from infranetes_common.wire import vmserver

SSH_PORT = 22  # of guests


@attrs.frozen
class GuestFile:
    """A small file that is kept equal in the guest, such as a key of a Secret."""

    content: bytes
    mode: int = 0o644  # permissions


class IGuestAccess(Interface):
    """One way into one VM's guest, over a connection of its own, made when needed and again after a loss.

    Methods fail with errors of `infranetes_common.errors`: `Unavailable` if the guest can't be reached or the
    connection is lost meanwhile, `NotOffered` for what this way can't do; the message names what can. What
    the guest sends is bounded and checked before it is handed on. Commands run as the guest's administrator.
    """

    name: str = Attribute("As the annotation `infranetes.io/guest` has it: ssh or guest-agent.")

    async def answers(within: float) -> None:
        """Return once the guest has answered. :param within: seconds.

        :raise Unavailable: it does not, or not in time; the message says why.
        :raise FailedPrecondition: it is not the guest that it should be: its host key is another."""

    async def run(
        command: Sequence[str], seconds: int, limit: float, max_output: int, stdin: bytes = b""
    ) -> vmserver.ExecSyncResponse:
        """Run a command to its end, as our agent does: a program that is missing has the exit code 127, one
        that can't be executed 126, and `stderr` says so; one that a signal ended has 128 and its number.

        :param seconds: after which it is killed; 0: never. :param limit: seconds after which this call gives
            up, if `seconds` is 0. :param max_output: bytes kept of each stream.
        :raise DeadlineExceeded: it was killed."""

    def session() -> SessionCall:
        """Begin a command with live streams: `send` its SessionStart, then its input."""

    async def put_files(directory: str, files: Mapping[str, GuestFile]) -> None:
        """Make a directory of the guest have exactly these files, each replaced whole. Idempotent.

        :param files: by path below the directory. :raise InvalidArgument: a path leads out of it."""

    async def usage() -> vmserver.StatsResponse:
        """Measure what the guest uses, as its own kernel counts it, in `machine` and `cards` alone.

        :raise NotOffered: this guest can't tell."""

    async def close() -> None:
        """Close the connection. Calls under way fail with Unavailable. Idempotent."""


class IPowersOff(Interface):
    """Also provided by an IGuestAccess that can have its guest power off, which may ignore a power button."""

    async def power_off() -> None:
        """Have the guest power off, as its administrator would. It may take its time after this.

        :raise NotOffered, FailedPrecondition: it refuses. :raise Unavailable: it can't be reached."""
