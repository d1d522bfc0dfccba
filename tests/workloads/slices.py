# SPDX-License-Identifier: Apache-2.0
"""The days on which workloads run beside the cluster's own tests."""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness import days

PACKAGE = "tests.workloads"
#: The slices, one for each day. Each takes up to a hundred seconds on two processors without KVM.
SLICES: Sequence[Sequence[str]] = (
    ("test_kubectl.DebugTests", "test_kubectl.AttachTests"),
    ("test_jobs.CronJobTests",),
    ("test_node.RebootTests",),
    ("test_kubectl.CopyTests", "test_kubectl.PortForwardTests"),
    ("test_node.KubeletTests", "test_sets.DaemonSetTests"),
    ("test_node.DrainTests",),
    ("test_mixed.QuickStartTests", "test_mixed.KilledTests"),
    ("test_mixed_images.PolicyTests",),
    ("test_own_volumes.VolumeTests",),
    ("test_own_volumes.FlexVolumeTests",),
    ("test_own_volumes.RawVolumeTests",),
)
#: The tests that are in no slice, and why.
LONG = {
    "test_node.ShutdownTests": "takes some minutes",
    "test_deployment.RollingUpdateTests": "takes some minutes",
    "test_sets.StatefulSetTests": "takes some minutes",
    "test_kubectl.LargeTests": "takes some minutes",
    "test_jobs.JobTests": "takes some minutes",
    "test_mixed_images.CollectionTests": "waits for kubelet, which collects images each five minutes",
    "test_own_volumes.MeasuredTests": "waits for kubelet, which measures volumes each minute",
    "test_volumes.EmptyDirTests": "takes some minutes, until kubelet has added up what volumes take",
    "test_claims.ClaimTests": "takes a cluster of its own, and its provisioner minutes to build",
    "test_autoscaling.AutoscalingTests": "takes some minutes, and its metrics-server as long to build",
}


def of_day(day: int) -> Sequence[str]:
    """Return the dotted names of the tests of that day, counted since 1970."""
    return [f"{PACKAGE}.{name}" for name in SLICES[day % len(SLICES)]]


def today() -> Sequence[str]:
    """Return those of today, in UTC."""
    return of_day(days.today())
