# SPDX-License-Identifier: Apache-2.0
"""The publisher to the AWS account that the configuration names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from infranetes.providers.cloud.aws.settings import Settings
from infranetes.publish.aws import AwsPublisher
from infranetes.publish.aws_clients import connect as connect_clients
from infranetes.publish.aws_errors import explained
from infranetes_common import config

_NO_IMAGE = "ami-00000000"  # stands for the image that is yet to be published


def connect(table: Mapping[str, object], source: str, options: argparse.Namespace) -> AwsPublisher:
    """See `Connect`."""
    settings = config.structure(
        {"image": _NO_IMAGE, **table}, Settings, source=source, prefix="providers.aws"
    )
    with explained("connect to AWS"):
        ec2, ebs = connect_clients(settings, options.ebs_endpoint)
    return AwsPublisher(ec2, ebs, protected=settings.image, boot_mode=options.boot_mode)
