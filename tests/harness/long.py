# SPDX-License-Identifier: Apache-2.0
"""Long tests that rest on the days with clusters: on those days there is no time for both.

`python -m tests.harness.long` prints what `python -m tests` leaves out today.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness import days

#: Each takes from half a minute to four minutes of a process.
LONG: Sequence[str] = (
    "tests.infranetes.daemon.test_agents",
    "tests.infranetes.daemon.test_aws_machines",
    "tests.infranetes.daemon.test_crash",
    "tests.infranetes.daemon.test_crash_soak",
    "tests.infranetes.daemon.test_hostile",
    "tests.infranetes.providers.cloud.test_aws_snapshots",
    "tests.infranetes.providers.cloud.test_aws_volumes",
    "tests.infranetes.providers.cloud.test_azure_faults",
    "tests.infranetes.providers.cloud.test_faults",
    "tests.infranetes.providers.cloud.test_openstack_faults",
    "tests.infranetes.providers.cloud.test_openstack_requests",
    "tests.infranetes.providers.cloud.test_vsphere_faults",
    "tests.infranetes.providers.cloud.test_vsphere_library",
    "tests.infranetes.providers.cloud.test_vsphere_volumes",
    "tests.infranetes.publish.test_aws",
    "tests.infranetes_simulation.test_namespaces",
    "tests.interop.test_crictl_streams",
    "tests.interop.test_csi_sanity",
)


def resting(day: int) -> Sequence[str]:
    """Return the dotted names of the modules that rest on that day, counted since 1970."""
    return LONG if days.with_clusters(day) else ()


if __name__ == "__main__":
    print(*(f"--without={name}" for name in resting(days.today())))
