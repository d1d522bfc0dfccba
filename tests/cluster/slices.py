# SPDX-License-Identifier: Apache-2.0
"""Tests in clusters that have their days in turn where there is no time for all.

`python -m tests.cluster.slices` says what `python -m tests` leaves out today.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness import days

PACKAGE = "tests.cluster"
#: One for every second day, in turn, as clusters have every second day; what is in none runs each time.
SLICES: Sequence[Sequence[str]] = (
    ("test_kube_proxy", "test_network_policies", "test_faults", "test_clouds"),
    ("test_nodes", "test_sshd", "test_end", "test_requests", "test_resize"),
)


def resting(day: int) -> Sequence[str]:
    """The dotted names of the modules that have not their turn on that day since 1970."""
    turn = day // 2 % len(SLICES)
    return [f"{PACKAGE}.{name}" for number, names in enumerate(SLICES) if number != turn for name in names]


if __name__ == "__main__":
    print(*(f"--without={name}" for name in resting(days.today())))
