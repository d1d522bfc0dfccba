# SPDX-License-Identifier: Apache-2.0
"""The `[pool]` table of the configuration."""

from __future__ import annotations

from collections import Counter

import attrs
from attrs.validators import ge, gt

from infranetes.providers.interface import Size
from infranetes_common.config import Bytes


@attrs.frozen
class PoolSize:
    """How many VMs of one size wait."""

    count: int = attrs.field(default=0, validator=ge(0))  # booted
    stopped: int = attrs.field(default=0, validator=ge(0))  # booted once, and stopped
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
    def targets(self) -> Counter[Size]:
        """How many booted VMs of each size there are to be."""
        targets: Counter[Size] = Counter()
        for entry in self.sizes:
            targets[entry.size] += entry.count
        return targets

    @property
    def stopped_targets(self) -> Counter[Size]:
        """How many stopped VMs of each size there are to be."""
        targets: Counter[Size] = Counter()
        for entry in self.sizes:
            targets[entry.size] += entry.stopped
        return targets

    @property
    def stops(self) -> bool:
        """Whether there are to be stopped VMs."""
        return any(entry.stopped for entry in self.sizes)
