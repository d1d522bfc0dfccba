# SPDX-License-Identifier: Apache-2.0
"""The start of the engine in a VM where it does not run until a pod needs it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from infranetes_common.commands import Command, check
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.reactors import IReactor


async def start_engine(reactor: IReactor, command: Sequence[str], seconds: float) -> None:
    """Run a command that starts Docker, such as `systemctl start docker`, and wait for its end.

    Does nothing if Docker runs already. If this is cancelled, systemd still finishes the start.

    :raise Unavailable: it failed, or did not end within `seconds`; the message has its output."""
    if not os.access(command[0], os.X_OK):
        raise Unavailable(
            f"Docker can't be started: {command[0]} is not a program in this VM; see start_command"
        )
    try:
        await check(reactor, Command(command, seconds))
    except InfranetesError as error:
        raise Unavailable(
            f"Docker was not started: {error}; the VM's console has more (infranetes-ctl console)"
        ) from None
