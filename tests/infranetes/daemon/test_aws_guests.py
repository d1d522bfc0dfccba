# SPDX-License-Identifier: Apache-2.0
"""Pods of images without our agent on a simulated EC2."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_programs, needs_systemd
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.guest_pods import GuestPods
from tests.support.clouds.aws import SimulatedAws


@slow(8, "daemons that are processes, and an SSH server for each guest")
@needs_programs("sshd")
@needs_systemd
class AwsGuestTests(GuestPods, CloudDaemonCase):
    """An instance that is stopped stays until it is terminated."""

    provider = "aws"
    make_world = SimulatedAws
