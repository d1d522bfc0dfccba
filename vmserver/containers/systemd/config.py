"""`[providers.systemd]` of the agent's configuration."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes_common.config import Bytes


@attrs.frozen
class SystemdConfig:
    """Every key has a default that serves a machine of Debian's."""

    socket: Path = Path("/run/systemd/private")  # systemd's own, which needs no D-Bus daemon
    journalctl: str = "journalctl"  # the program
    journal_dir: Path | None = None  # the journal's files; unless given, the machine's own journal
    image_dir: Path = Path("/var/lib/vmserver/systemd")  # executables that were fetched
    image_max_size: Bytes = Bytes(1 << 30)  # of one executable
    fetch_timeout: float = 600.0  # seconds for all of one
    ca_file: Path | None = None  # PEM certificates that https servers may have; unless given, the machine's
    tasks_max: int = 16384  # processes and threads of one container; 0: as many as the machine allows
