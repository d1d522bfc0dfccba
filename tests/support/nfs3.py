# SPDX-License-Identifier: Apache-2.0
"""A real NFSv3 server without rpcbind or the kernel's NFS: an example of go-nfs, built by `make tools`."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "tools" / "osnfs"


class Nfs3Server:
    """Serves a directory as `/mount`, at all addresses of this machine, until `end`.

    :ivar port: the port that it listens on, for both NFS and MOUNT."""

    def __init__(self, directory: Path) -> None:
        if not PROGRAM.exists():
            raise AssertionError(f"{PROGRAM} is missing: make tools")
        self._process = subprocess.Popen(
            [PROGRAM, directory], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().decode().strip()
        self.port = int(said.rpartition(":")[2])

    def end(self) -> None:
        """End the server. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
