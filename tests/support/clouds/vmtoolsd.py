# SPDX-License-Identifier: Apache-2.0
"""A fake of open-vm-tools' vmtoolsd."""

from __future__ import annotations

from pathlib import Path

from infranetes.providers.cloud.vsphere.specs import IDENTITY


def write(directory: Path, identity: str, seen_at: Path | None = None) -> Path:
    """Write the part of it that the agent uses, with an identity in its guestinfo; return the program.

    :param seen_at: the path at which the agent sees the directory; None: `directory`."""
    guestinfo = directory / "guestinfo"
    guestinfo.touch(mode=0o600)
    guestinfo.write_text(identity)
    file = (seen_at or directory) / "guestinfo"
    tools = directory / "vmtoolsd"
    tools.touch(mode=0o700)
    tools.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'"--cmd info-get {IDENTITY}") cat "{file}" ;;\n'
        f'"--cmd info-set {IDENTITY} "*) printf %s "${{2##* }}" > "{file}" ;;\n'
        "*) exit 1 ;;\n"
        "esac\n"
    )
    return tools
