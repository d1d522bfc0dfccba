# SPDX-License-Identifier: Apache-2.0
"""Tests in clusters that take turns by day, where there is no time for all of them.

`python -m tests.cluster.slices` prints what `python -m tests` leaves out today.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness import days

PACKAGE = "tests.cluster"
#: The slices, one for each day. Modules in none run each time.
SLICES: Sequence[Sequence[str]] = (
    ("test_kube_proxy", "test_network_policies", "test_faults", "test_clouds"),
    ("test_nodes", "test_sshd", "test_end", "test_requests", "test_resize", "test_pinning", "test_plugin"),
)


def resting(day: int) -> Sequence[str]:
    """Return the dotted names of the modules whose turn is not on that day, counted since 1970."""
    turn = day % len(SLICES)
    return [f"{PACKAGE}.{name}" for number, names in enumerate(SLICES) if number != turn for name in names]


if __name__ == "__main__":
    print(*(f"--without={name}" for name in resting(days.today())))
