# SPDX-License-Identifier: Apache-2.0
"""containerd, for tests that kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.interop.critest_runtimes import END_SECONDS, Containerd
from tests.support.registry import Registry


class Killable(Containerd):
    """It can be killed, and started again over what it has."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._ran: tuple[list[str], Mapping[str, str]] = ([], {})

    def command(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        self._ran = self.configured(registry)
        return self._ran

    def configured(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        """As `command`."""
        found = super().command(registry)
        path = self.root / "config.toml"
        without = 'disabled_plugins = ["io.containerd.internal.v1.opt"]'  # writes outside of its root
        path.write_text(f"{without}\n{path.read_text()}")
        return found

    def kill(self) -> None:
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def again(self) -> None:
        command, environment = self._ran
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        """As ever; a process that was killed is needed once more, to end what its pods are."""
        if self._process is not None and self._process.poll() is not None:
            self.again()
            until = time.monotonic() + END_SECONDS
            while not self._ready() and time.monotonic() < until:
                time.sleep(0.2)
        super().end()
