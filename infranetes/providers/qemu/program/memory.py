# SPDX-License-Identifier: Apache-2.0
"""Memory that several QEMUs map."""

from __future__ import annotations

import os


class Memory:
    """A sealed memfd. It is closed once nobody has this object; VMs that map it keep its pages."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._descriptor
