# SPDX-License-Identifier: Apache-2.0
"""The order in which tests run in parallel, and which tests must not run at the same time.

Tests that use something of which the machine has only one are declared here, and nowhere else.
"""

from __future__ import annotations

import os
import threading
import unittest
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import attrs

from tests.harness.durations import Durations, slow_of
from tests.harness.needs import needs_of

# Tests that share a word never run at the same time. A name stands for all tests in that package or module.
SHARED: Mapping[str, tuple[str, ...]] = {
    # Each emulated VM keeps a processor busy, and all VMs share one template and one guest image.
    "tests.e2e.test_checkpoints": ("real VMs",),
    "tests.e2e.test_clocks": ("real VMs", "host ports"),
    "tests.e2e.test_cloud_disks": ("real VMs",),
    "tests.e2e.test_debian_pods": ("real VMs", "host ports"),
    "tests.e2e.test_demo": ("real VMs",),
    "tests.e2e.test_disk_troubles": ("real VMs",),
    "tests.e2e.test_docker": ("real VMs", "host ports"),
    "tests.e2e.test_image_pods": ("real VMs", "host ports"),
    "tests.e2e.test_quiet_guest": ("real VMs",),
    "tests.e2e.test_root_volumes": ("real VMs",),
    "tests.e2e.test_namespaces": ("real VMs", "host ports"),
    "tests.e2e.test_networks": ("real VMs",),
    "tests.e2e.test_node_page": ("real VMs",),
    "tests.e2e.test_pods": ("real VMs", "host ports"),
    "tests.e2e.test_qemu_provider": ("real VMs",),
    "tests.e2e.test_sizes": ("real VMs",),
    "tests.e2e.test_sleeping_pods": ("real VMs",),
    "tests.e2e.test_sleeping_vms": ("real VMs",),
    "tests.e2e.test_units": ("real VMs", "systemd"),
    "tests.e2e.test_user_namespaces": ("real VMs", "host ports"),
    "tests.e2e.test_packages": ("systemd",),
    "tests.e2e.test_upgrades": ("real VMs", "systemd"),
    "tests.e2e.test_volumes": ("real VMs",),
    "tests.e2e.test_warm_replicas": ("real VMs",),
    # Two booted systemds share what units of one name have in the machine's control groups of version 1.
    "tests.chart": ("real VMs", "Kubernetes", "systemd"),
    "tests.e2e.test_installer": ("systemd",),
    "tests.cluster": ("real VMs", "host ports", "Kubernetes"),
    "tests.guests": ("real VMs", "host ports"),
    "tests.delegates": ("real VMs", "host ports"),
    "tests.workloads": ("real VMs", "host ports", "Kubernetes"),
    # route_localnet and the table that guards it exist once per network namespace.
    "tests.infranetes.daemon.test_crash": ("host ports",),
    "tests.infranetes.daemon.test_semantics": ("host ports",),
    "tests.infranetes.hostports.test_table": ("host ports",),
    # They use bridges of the same names, and their subnets.
    "tests.infranetes.providers.qemu.network.test_agent_port": ("bridge",),
    "tests.infranetes.providers.qemu.network.test_firewall_changes": ("bridge",),
    "tests.infranetes.providers.qemu.network.test_firewalls": ("bridge",),
    "tests.infranetes.providers.qemu.launch.test_launches": ("bridge",),
    "tests.infranetes.providers.qemu.network.test_neighbours": ("bridge",),
    "tests.infranetes.providers.qemu.network.test_bridge": ("bridge",),
    "tests.infranetes.providers.qemu.sleep": ("bridge",),
    # They publish volumes of the same names among the node's mounts.
    "tests.infranetes.csi": ("published volumes",),
    # They use the same addresses on the node.
    "tests.vmserver.firewall.test_firewall.FirewallTests": ("addresses of a pod's firewall",),
    "tests.vmserver.rpc.test_firewalls_of_pods": ("addresses of a pod's firewall",),
    # It overloads a processor, so that its samples have to wait for it.
    "tests.harness.test_runner": ("busy machine",),
}
# Tests that run alone, and why.
ALONE: Mapping[str, str] = {}
# Of these words, each of several workers that are isolated has a machine of its own.
OWN: frozenset[str] = frozenset(
    {"host ports", "bridge", "published volumes", "addresses of a pod's firewall"}
)
GIB = 1 << 30
VMS_MEMORY = 5 * GIB  # of a unit with real VMs: of its VMs, up to three of 1 GiB, and its daemons


def vms_at_once(processors: int, memory: int) -> int:
    """Return how many units with real VMs a machine has processors and memory for, but at least one."""
    return max(1, min(processors, memory // VMS_MEMORY))


# How many units may share a word at the same time where workers are isolated; of any other word, one.
AT_ONCE: Mapping[str, int] = {
    "real VMs": vms_at_once(os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
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
    """The tests of one class, which run one after another.

    :ivar seconds: about how long they take.
    :ivar as_root: whether they need root.
    """

    name: str
    tests: tuple[str, ...]
    seconds: float = 1.0
    as_root: bool = False

    @property
    def shared(self) -> frozenset[str]:
        """The words for what its tests use and no other unit may use at the same time."""
        return frozenset(word for name, words in SHARED.items() if within(self.name, name) for word in words)

    @property
    def alone(self) -> bool:
        """Whether it runs alone."""
        return any(within(self.name, name) for name in ALONE)


def units(tests: Iterable[unittest.TestCase], durations: Durations) -> list[Unit]:
    """Group tests by class."""
    grouped: dict[str, list[unittest.TestCase]] = {}
    for test in tests:
        grouped.setdefault(test.id().rpartition(".")[0] or test.id(), []).append(test)
    return [
        Unit(
            name,
            tuple(test.id() for test in members),
            sum(durations.expected(test.id(), slow_of(test)) for test in members),
            any(need.asks_for_root for test in members for need in needs_of(test)),
        )
        for name, members in grouped.items()
    ]


class Schedule:
    """Hands out units to workers, in any thread: the longest first, those that run alone at the end.

    Units that share something each count as long as all of them together, because they wait for each other.

    :param isolated: whether each worker has a machine of its own, as far as namespaces make one.
    """

    def __init__(self, units: Iterable[Unit], isolated: bool = False) -> None:
        units = list(units)
        self._isolated = isolated

        def urgency(unit: Unit) -> tuple[bool, float, float, str]:
            words = self._shared(unit)
            together = sum(other.seconds for other in units if other is unit or self._shared(other) & words)
            return unit.alone, -together, -unit.seconds, unit.name

        self._waiting = sorted(units, key=urgency)
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
        if any(other.alone for other in self._running):
            return False
        in_use = Counter(word for other in self._running for word in self._shared(other))
        return all(in_use[word] < self._at_once(word) for word in self._shared(unit))

    def _shared(self, unit: Unit) -> frozenset[str]:
        return unit.shared - OWN if self._isolated else unit.shared

    def _at_once(self, word: str) -> int:
        return AT_ONCE.get(word, 1) if self._isolated else 1
