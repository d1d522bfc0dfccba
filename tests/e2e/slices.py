# SPDX-License-Identifier: Apache-2.0
"""Tests with real VMs that take turns by day where there is no time for all: they run one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness import days

PACKAGE = "tests.e2e"
#: One slice for every second day, as tests with real VMs run every second day. Modules that are in no slice
#: run each time. A slice takes about five minutes without KVM.
SLICES: Sequence[Sequence[str]] = (
    ("test_pod_docker", "test_full_disk", "test_huge_pages", "test_units"),
    ("test_choice", "test_user_namespaces", "test_vm_network", "test_clock"),
    ("test_postgresql", "test_memory", "test_qemu_firewalls", "test_services"),
    ("test_vm_image_volumes", "test_oci", "test_repository", "test_removal"),
    ("test_cloud_disk", "test_unit_pod", "test_upgrade"),
    ("test_docker_volumes", "test_full_volumes", "test_package_upgrade", "test_more_cloud_disks"),
)


def resting(day: int) -> Sequence[str]:
    """Return the dotted names of the modules whose turn is not on that day, counted since 1970."""
    turn = day // 2 % len(SLICES)
    others = [each for number, each in enumerate(SLICES) if number != turn]
    return [f"{PACKAGE}.{name}" for names in others for name in names]


def resting_today() -> Sequence[str]:
    """Return today's, by UTC."""
    return resting(days.today())
