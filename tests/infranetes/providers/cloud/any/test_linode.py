# SPDX-License-Identifier: Apache-2.0
"""The provider of any driver, with libcloud's driver of Linode on a simulated Linode."""

from __future__ import annotations

from unittest import skipIf

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.any import dialects
from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.any.case import NodesLastingFaults, NodesPassingFaults, VpsCase
from tests.support.clouds.vps import Linode

OLD = not dialects.takes(dialects.concrete("linode").create_node, "ex_userdata")
needs_user_data = skipIf(OLD, "libcloud's driver of Linode takes user-data since 3.9, and this one is older")


@needs_user_data
class LinodeContractTests(VpsCase, PodProviderContract, TestCase):
    """The contract of all providers."""

    api = Linode


@needs_user_data
class LinodePassingFaultTests(VpsCase, NodesPassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""

    tells_retry_after = False
    api = Linode


@needs_user_data
class LinodeLastingFaultTests(VpsCase, NodesLastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""

    api = Linode
