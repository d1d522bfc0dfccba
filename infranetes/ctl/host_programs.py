# SPDX-License-Identifier: Apache-2.0
"""What the node's own programs say for a maintainer: systemd of the units, and nftables of our tables."""

from __future__ import annotations

import io
import re

from infranetes_common.commands import Command, check, run
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import end_of

UNIT, GUEST_UNIT = "infranetes", "infranetes-guest"
SECONDS = 50.0
JOURNAL_LINES = 20_000
MAX_JOURNAL = 8 << 20  # characters
MOST_TABLES = 32

_OUR_TABLE = re.compile(r"^table (\S+) (infranetes\S*)$", re.MULTILINE)


async def units(reactor: IReactor) -> str:
    """Return the states of the daemon's unit and of the one that builds the guest image.

    :raise FailedPrecondition: systemd does not tell."""
    command = ["systemctl", "status", "--no-pager", "--full", "--lines=0", UNIT, GUEST_UNIT]
    output = await run(reactor, Command(command, SECONDS))
    if not output.stdout:  # its exit status says only whether both of them run
        raise FailedPrecondition(f"`systemctl status` says nothing of {UNIT}: {output.message()}")
    return (output.stdout + output.stderr).decode(errors="replace")


async def journal(reactor: IReactor, unit: str) -> str:
    """Return the end of a unit's journal.

    :raise FailedPrecondition: it can't be read."""
    lines = f"--lines={JOURNAL_LINES}"
    # The newest first: of too much output the rest is dropped.
    command = ["journalctl", f"--unit={unit}", lines, "--reverse", "--no-pager", "--output=short-iso"]
    output = await run(reactor, Command(command, SECONDS, most=4 * MAX_JOURNAL))
    if output.code:
        raise FailedPrecondition(f"the journal of {unit} can't be read: {output.message()}")
    return end_of(_turned(output.stdout.decode(errors="replace")), MAX_JOURNAL)


def _turned(text: str) -> str:
    """Return a journal's entries in reverse order. The further lines of an entry are indented."""
    entries: list[list[str]] = []
    for line in io.StringIO(text):
        if entries and line[0] in " \t":
            entries[-1].append(line)
        else:
            entries.append([line])
    return "".join(line for entry in reversed(entries) for line in entry)


async def tables(reactor: IReactor) -> str:
    """Return those of nftables' tables that are ours, with what is in them.

    :raise InfranetesError: nftables does not tell."""
    listed = (await check(reactor, Command(["nft", "list", "tables"], SECONDS))).decode(errors="replace")
    ours = _OUR_TABLE.findall(listed)
    found = [f"# {len(ours)} tables\n"]
    for family, name in ours[:MOST_TABLES]:
        output = await run(reactor, Command(["nft", "list", "table", family, name], SECONDS))
        found.append((output.stdout + output.stderr).decode(errors="replace"))
    return "".join(found)
