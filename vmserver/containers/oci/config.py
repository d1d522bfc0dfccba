# SPDX-License-Identifier: Apache-2.0
"""`[providers.oci]` of the agent's configuration."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes_common.config import Bytes


@attrs.frozen
class OciConfig:
    """The keys; their defaults suit Debian."""

    conmon: str = "conmon"  # the program
    crun: str = "crun"  # the program
    directory: Path = Path("/var/lib/vmserver/oci")  # on a disk: records, logs, and containers' written files
    layer_dir: Path = Path("/var/lib/vmserver/layers")  # on a disk: layers brought by the node
    log_max_size: Bytes = Bytes(64 << 20)  # per log file
    log_max_files: int = 3  # log files, including the newest
