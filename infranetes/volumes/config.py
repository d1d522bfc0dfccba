"""`[volumes]` of the node's configuration."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt

from infranetes_common.config import Bytes
from infranetes_common.entries import Bounds


@attrs.frozen
class VolumesConfig:
    """What is carried into VMs of one mount, and how often it is looked at."""

    max_bytes: Bytes = attrs.field(default=Bytes(256 * 1024 * 1024), validator=ge(Bytes(1)))
    max_entries: int = attrs.field(default=16384, validator=ge(1))
    interval: float = attrs.field(default=1.0, validator=gt(0))  # seconds between two looks

    @property
    def bounds(self) -> Bounds:
        """Both as one."""
        return Bounds(self.max_entries, self.max_bytes)
