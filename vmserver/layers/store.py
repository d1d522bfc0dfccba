# SPDX-License-Identifier: Apache-2.0
"""The layers that this VM has, each mounted read-only at a directory of its own."""

from __future__ import annotations

from pathlib import Path


class LayerStore:
    """The VM's layers."""

    def directory(self, diff_id: str) -> Path | None:
        """Return where a layer is mounted; None if it is not."""
        raise NotImplementedError
