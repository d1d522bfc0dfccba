# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is the VM on a simulated EC2, through the CRI of a daemon that is a process."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_systemd
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.machine_pods import AllOfMachinePods
from tests.support.clouds.aws import SimulatedAws


@slow(8, "instances boot as machines of their own, at a simulated cloud")
@needs_systemd
class AwsMachineTests(AllOfMachinePods, CloudDaemonCase):
    """Images are selected by owner and tags; an instance that shuts itself down is terminated."""

    provider = "aws"
    make_world = SimulatedAws
    size = "t3.small"
    looked_for = ("infranetes=true", "infranetes.image_name=web:9", "self", "eu-west-1")
    annotation = ("infranetes.aws.image", "ami-0123456789abcdef0")
