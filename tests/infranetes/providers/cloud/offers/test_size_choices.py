# SPDX-License-Identifier: Apache-2.0
"""The contract of `IChoosesSizes` over each cloud."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.size_choices import SizeChoicesContract
from tests.infranetes.providers.cloud.case import AwsCase, AzureCase, GcpCase, OpenStackCase
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase


class AwsSizeChoicesTests(SizeChoicesContract, AwsCase, TestCase):
    pass


class GcpSizeChoicesTests(SizeChoicesContract, GcpCase, TestCase):
    pass


class AzureSizeChoicesTests(SizeChoicesContract, AzureCase, TestCase):
    pass


class OpenStackSizeChoicesTests(SizeChoicesContract, OpenStackCase, TestCase):
    pass


class VsphereSizeChoicesTests(SizeChoicesContract, VsphereCase, TestCase):
    pass
