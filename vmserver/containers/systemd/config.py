# SPDX-License-Identifier: Apache-2.0
"""`[providers.systemd]` of the agent's configuration."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes_common.config import Bytes


@attrs.frozen
class SystemdConfig:
    """The keys; their defaults suit Debian."""

    socket: Path = Path("/run/systemd/private")  # systemd's private socket, which needs no D-Bus daemon
    journalctl: str = "journalctl"  # the program
    journal_dir: Path | None = None  # the journal's files; by default the VM's own journal
    image_dir: Path = Path("/var/lib/vmserver/systemd")  # downloaded executables
    image_max_size: Bytes = Bytes(1 << 30)  # per executable
    fetch_timeout: float = 600.0  # seconds per download
    ca_file: Path | None = None  # PEM certificates of trusted authorities; by default the VM's
    tasks_max: int = 16384  # processes and threads per container; 0 for the VM's own limit
