# SPDX-License-Identifier: Apache-2.0
"""The sizes of VMs. vSphere allows any; pods get one of these."""

from __future__ import annotations

from infranetes.providers.cloud.interface import Offer

_CPUS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MIB = tuple(
    step << shift for shift in range(20) for step in (512, 768) if step << shift <= 1 << 20
)  # 512 MiB, 768 MiB, 1 GiB, 1.5 GiB ... 1 TiB


def offers() -> tuple[Offer, ...]:
    """Return each number of CPUs with each amount of memory, as `2cpu-4096mib`, without prices."""
    return tuple(
        Offer(name=f"{cpus}cpu-{mib}mib", cpu_millis=cpus * 1000, memory_bytes=mib << 20)
        for cpus in _CPUS
        for mib in _MIB
    )


def parse(name: str) -> tuple[int, int]:
    """Return CPUs and MiB of a size's name."""
    cpus, _, mib = name.partition("cpu-")
    return int(cpus), int(mib.removesuffix("mib"))
