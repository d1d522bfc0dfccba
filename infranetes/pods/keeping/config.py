# SPDX-License-Identifier: Apache-2.0
"""`[kept]` of the node's configuration."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt

from infranetes_common.config import Bytes


@attrs.frozen
class KeptConfig:
    """Which kept states are removed by themselves."""

    max_bytes: Bytes = attrs.field(default=Bytes(20 << 30), validator=ge(Bytes(0)))  # of all of them
    unused: float = attrs.field(default=14 * 86400.0, validator=gt(0))  # seconds since a pod started from one
