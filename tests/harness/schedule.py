# SPDX-License-Identifier: Apache-2.0
"""The order in which tests run in parallel, and which tests must not run at the same time.

Tests that use something of which the machine has only one are declared here, and nowhere else.
"""

from __future__ import annotations

import threading
import unittest
from collections.abc import Iterable, Iterator, Mapping

import attrs

# Tests that share a word never run at the same time. A name stands for all tests in that package or module.
SHARED: Mapping[str, tuple[str, ...]] = {
    # Each emulated VM keeps a processor busy, and all VMs share one template and one guest image.
    "tests.e2e.test_pod": ("real VMs", "host ports"),
    "tests.e2e.test_pod_docker": ("real VMs", "host ports"),
    "tests.e2e.test_empty_dirs": ("real VMs",),
    "tests.e2e.test_full_disk": ("real VMs",),
    "tests.e2e.test_huge_pages": ("real VMs",),
    "tests.e2e.test_memory": ("real VMs",),
    "tests.e2e.test_oci": ("real VMs",),
    "tests.e2e.test_accelerator": ("real VMs",),
    "tests.e2e.test_attached_volumes": ("real VMs",),
    "tests.e2e.test_block_volumes": ("real VMs",),
    "tests.e2e.test_choice": ("real VMs",),
    "tests.e2e.test_clock": ("real VMs",),
    "tests.e2e.test_cloud_disk": ("real VMs",),
    "tests.e2e.test_more_cloud_disks": ("real VMs",),
    "tests.e2e.test_docker_volumes": ("real VMs",),
    "tests.e2e.test_full_volumes": ("real VMs",),
    "tests.e2e.test_vm_image_volumes": ("real VMs",),
    "tests.e2e.test_postgresql": ("real VMs",),
    "tests.e2e.test_volume_troubles": ("real VMs",),
    "tests.e2e.test_cni": ("real VMs", "host ports"),
    "tests.e2e.test_network_policies": ("real VMs",),
    "tests.e2e.test_nfs": ("real VMs",),
    "tests.e2e.test_qemu_disks": ("real VMs",),
    "tests.e2e.test_qemu_firewalls": ("real VMs",),
    "tests.e2e.test_qemu_namespaces": ("real VMs",),
    "tests.e2e.test_qemu_provider": ("real VMs",),
    "tests.e2e.test_resize": ("real VMs",),
    "tests.e2e.test_services": ("real VMs",),
    "tests.e2e.test_unit_pod": ("real VMs",),
    "tests.e2e.test_upgrade": ("real VMs",),
    "tests.e2e.test_user_namespaces": ("real VMs",),
    "tests.e2e.test_vm_network": ("real VMs",),
    "tests.e2e.test_volume_snapshots": ("real VMs",),
    "tests.e2e.test_demo": ("real VMs", "built packages"),
    "tests.cluster": ("real VMs", "host ports", "Kubernetes"),
    "tests.delegates": ("real VMs", "host ports"),
    "tests.workloads": ("real VMs", "host ports", "Kubernetes"),
    # They write build/deb, dist and the clean root's cache.
    "tests.e2e.test_package": ("built packages",),
    "tests.e2e.test_package_upgrade": ("built packages",),
    "tests.e2e.test_repository": ("built packages",),
    "tests.e2e.test_units": ("built packages",),
    "tests.e2e.test_removal": ("real VMs", "built packages"),
    # route_localnet and the table that guards it exist once per network namespace.
    "tests.infranetes.daemon.test_crash": ("host ports",),
    "tests.infranetes.daemon.test_semantics": ("host ports",),
    "tests.infranetes.hostports.test_table": ("host ports",),
    # They use the bridge inftest1 and its subnets.
    "tests.infranetes.providers.test_qemu_firewall_changes": ("bridge",),
    "tests.infranetes.providers.test_qemu_firewalls": ("bridge",),
    "tests.infranetes.providers.test_qemu_neighbours": ("bridge",),
    "tests.infranetes.providers.test_qemu_node": ("bridge",),
    # They publish volumes of the same names among the node's mounts.
    "tests.infranetes.csi": ("published volumes",),
    # They use the same addresses on the node.
    "tests.vmserver.firewall.test_firewall.FirewallTests": ("addresses of a pod's firewall",),
    "tests.vmserver.rpc.test_firewalls_of_pods": ("addresses of a pod's firewall",),
    # It overloads a processor, so that its samples have to wait for it.
    "tests.harness.test_runner": ("busy machine",),
}
# Tests that run alone, and why.
ALONE: Mapping[str, str] = {
    "tests.infranetes.daemon.test_hanging": "measures how long calls take beside others that hang",
    "tests.infranetes.daemon.test_hostile": "measures how long calls take beside a hostile agent",
    "tests.infranetes.daemon.test_live_mounts": "measures how long a change takes to be seen",
}
# About how many seconds each long test takes; any other counts as one second. This decides only the order.
SECONDS: Mapping[str, float] = {
    "tests.e2e.test_demo": 300,
    "tests.e2e.test_package": 120,
    "tests.e2e.test_package_upgrade": 100,
    "tests.e2e.test_pod": 300,
    "tests.e2e.test_pod_docker": 250,
    "tests.e2e.test_empty_dirs": 30,
    "tests.e2e.test_full_disk": 70,
    "tests.e2e.test_memory": 100,
    "tests.e2e.test_oci": 200,
    "tests.e2e.test_attached_volumes": 20,
    "tests.e2e.test_choice": 150,
    "tests.e2e.test_clock": 100,
    "tests.e2e.test_cloud_disk": 300,
    "tests.e2e.test_more_cloud_disks": 200,
    "tests.e2e.test_docker_volumes": 120,
    "tests.e2e.test_full_volumes": 80,
    "tests.e2e.test_vm_image_volumes": 250,
    "tests.e2e.test_postgresql": 200,
    "tests.e2e.test_volume_troubles": 60,
    "tests.e2e.test_cni": 40,
    "tests.e2e.test_network_policies": 60,
    "tests.e2e.test_qemu_disks": 150,
    "tests.e2e.test_qemu_firewalls": 100,
    "tests.e2e.test_qemu_provider": 300,
    "tests.e2e.test_resize": 30,
    "tests.e2e.test_repository": 120,
    "tests.e2e.test_services": 100,
    "tests.e2e.test_units": 60,
    "tests.e2e.test_unit_pod": 150,
    "tests.e2e.test_user_namespaces": 120,
    "tests.e2e.test_vm_network": 90,
    "tests.harness.test_runner": 40,
    "tests.infranetes.daemon.test_agents": 120,
    "tests.infranetes.daemon.test_aws": 50,
    "tests.infranetes.daemon.test_confinement": 20,
    "tests.infranetes.daemon.test_upgrades": 60,
    "tests.infranetes.daemon.test_enter": 60,
    "tests.infranetes.daemon.test_azure": 15,
    "tests.infranetes.daemon.test_crash": 120,
    "tests.infranetes.daemon.test_delegate_images": 30,
    "tests.infranetes.daemon.test_delegate": 30,
    "tests.infranetes.daemon.test_gcp": 40,
    "tests.infranetes.daemon.test_crash_soak": 100,
    "tests.infranetes.daemon.test_crash_soak.FaultySoakTests": 250,
    "tests.infranetes.daemon.test_layers": 80,
    "tests.infranetes.daemon.test_mixed_soak": 30,
    "tests.infranetes.daemon.test_namespaces": 30,
    "tests.infranetes.daemon.test_user_namespaces": 40,
    "tests.infranetes.daemon.test_vsphere": 40,
    "tests.infranetes.guest.test_guest.BuildTests": 30,
    "tests.infranetes.images.test_disks": 60,
    "tests.infranetes.images.test_disks_ends": 60,
    "tests.infranetes.images.erofs": 30,
    "tests.infranetes.images.test_failures": 60,
    "tests.infranetes.images.test_store": 60,
    "tests.infranetes.logs.test_container.KilledAnywhereTests": 40,
    "tests.infranetes.logs.test_processes": 80,
    "tests.infranetes.overlay": 30,
    "tests.infranetes.pods.test_races": 50,
    "tests.infranetes.providers.cloud.test_aws": 60,
    "tests.infranetes.providers.cloud.test_azure": 35,
    "tests.infranetes.providers.cloud.test_azure_faults": 60,
    "tests.infranetes.providers.cloud.test_azure_requests": 15,
    "tests.infranetes.providers.cloud.test_faults": 80,
    "tests.infranetes.providers.cloud.test_gcp": 60,
    "tests.infranetes.providers.cloud.test_gcp_snapshots": 15,
    "tests.infranetes.providers.cloud.test_gcp_volumes": 20,
    "tests.infranetes.providers.cloud.test_openstack": 40,
    "tests.infranetes.providers.cloud.test_openstack_faults": 60,
    "tests.infranetes.providers.cloud.test_openstack_requests": 15,
    "tests.infranetes.providers.cloud.test_requests": 30,
    "tests.infranetes.providers.cloud.test_silence": 20,
    "tests.infranetes.providers.cloud.test_vsphere": 120,
    "tests.infranetes.providers.cloud.test_vsphere_faults": 120,
    "tests.infranetes.providers.cloud.test_vsphere_library": 60,
    "tests.infranetes.providers.test_qemu_firewall_changes": 40,
    "tests.infranetes.providers.test_qemu_firewalls": 30,
    "tests.infranetes.policies.test_faults": 15,
    "tests.infranetes.services.test_faults": 30,
    "tests.interop": 60,
    "tests.txgrpc.test_hostile": 40,
    "tests.vmserver.containers": 60,
    "tests.vmserver.containers.oci.test_provider": 90,
    "tests.vmserver.containers.oci.test_recovery.KilledAgentTests": 150,
    "tests.vmserver.containers.test_docker": 120,
    "tests.vmserver.firewall": 30,
    "tests.vmserver.rpc.test_firewalls_of_pods": 15,
    "tests.vmserver.layers.test_killed": 30,
}


def within(name: str, container: str) -> bool:
    """Return whether the dotted `name` is `container` or something in it."""
    return name == container or name.startswith(f"{container}.")


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield all tests in a suite, including those that stand for modules that can't be loaded."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        else:
            yield test


@attrs.frozen
class Unit:
    """The tests of one class, which run one after another."""

    name: str
    tests: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """About how long its tests take."""
        return max((seconds for name, seconds in SECONDS.items() if within(self.name, name)), default=1.0)

    @property
    def shared(self) -> frozenset[str]:
        """The words for what its tests use and no other unit may use at the same time."""
        return frozenset(word for name, words in SHARED.items() if within(self.name, name) for word in words)

    @property
    def alone(self) -> bool:
        """Whether it runs alone."""
        return any(within(self.name, name) for name in ALONE)


def units(tests: Iterable[str]) -> list[Unit]:
    """Group tests, given by their dotted names, by class."""
    found: dict[str, list[str]] = {}
    for test in tests:
        found.setdefault(test.rpartition(".")[0] or test, []).append(test)
    return [Unit(name, tuple(tests)) for name, tests in found.items()]


class Schedule:
    """Hands out units to workers, in any thread: the longest first, those that run alone at the end.

    Units that share something each count as long as all of them together, because they wait for each other.
    """

    def __init__(self, given: Iterable[Unit]) -> None:
        given = list(given)

        def urgency(unit: Unit) -> tuple[bool, float, float, str]:
            together = sum(other.seconds for other in given if other is unit or other.shared & unit.shared)
            return unit.alone, -together, -unit.seconds, unit.name

        self._waiting = sorted(given, key=urgency)
        self._running: list[Unit] = []
        self._changed = threading.Condition()

    def take(self) -> Unit | None:
        """Wait until a unit may run, and return it; None: none is left."""
        with self._changed:
            while True:
                for unit in self._waiting:
                    if self.may_run(unit):
                        self._waiting.remove(unit)
                        self._running.append(unit)
                        return unit
                if not self._waiting:
                    return None
                self._changed.wait()

    def done(self, unit: Unit) -> None:
        """Note that a unit has ended."""
        with self._changed:
            self._running.remove(unit)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out no more units."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def may_run(self, unit: Unit) -> bool:
        """Return whether a unit may run beside those that run now."""
        if unit.alone:
            return not self._running
        return not any(other.alone or other.shared & unit.shared for other in self._running)
