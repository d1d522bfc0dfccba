# SPDX-License-Identifier: Apache-2.0
"""`[volumes]` of the node's configuration."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, gt, lt

from infranetes_common.config import Bytes
from infranetes_common.filesync.manifest import Bounds


@attrs.frozen
class VolumesConfig:
    """What of one mount is carried into a VM, and how often it is looked at."""

    max_bytes: Bytes = attrs.field(default=Bytes(256 * 1024 * 1024), validator=ge(Bytes(1)))
    max_entries: int = attrs.field(default=16384, validator=ge(1))
    interval: float = attrs.field(default=1.0, validator=gt(0))  # seconds between two looks
    show_space: bool = True  # have files on the node that show kubelet the use of emptyDirs in VMs
    # The share of the node's file system that these files leave free, so that kubelet evicts no pod for them.
    keep_free: float = attrs.field(default=0.2, validator=and_(ge(0.0), lt(1.0)))

    @property
    def bounds(self) -> Bounds:
        """Both limits of one mount."""
        return Bounds(self.max_entries, self.max_bytes)
