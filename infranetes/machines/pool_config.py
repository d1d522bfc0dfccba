# SPDX-License-Identifier: Apache-2.0
"""The `[pool]` table of the configuration."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt

from infranetes.providers.interface import Size
from infranetes_common.config import Bytes


@attrs.frozen
class PoolSize:
    """How many VMs of one size are kept booted."""

    count: int = attrs.field(validator=ge(0))
    cpu_millis: int = attrs.field(default=0, validator=ge(0))  # 1000: one core; 0: the provider's default
    # The memory for the pod; 0: the provider's default.
    memory: Bytes = attrs.field(default=Bytes(0), validator=ge(Bytes(0)))

    @property
    def size(self) -> Size:
        """The size, as providers are asked for it."""
        return Size(cpu_millis=self.cpu_millis, memory_bytes=int(self.memory))


@attrs.frozen
class PoolConfig:
    """Which VMs wait for pods, and how fast they are made."""

    sizes: tuple[PoolSize, ...] = ()  # none: there is no pool
    parallel: int = attrs.field(default=4, validator=ge(1))  # the most VMs that boot for the pool at once
    per_minute: int = attrs.field(default=30, validator=ge(1))  # the most launches that begin in a minute
    retry: float = attrs.field(default=5.0, validator=gt(0))  # seconds after a failure; doubles up to 300

    @property
    def targets(self) -> dict[Size, int]:
        """How many VMs of each size there are to be."""
        targets: dict[Size, int] = {}
        for each in self.sizes:
            targets[each.size] = targets.get(each.size, 0) + each.count
        return targets
