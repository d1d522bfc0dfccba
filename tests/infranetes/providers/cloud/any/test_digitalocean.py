# SPDX-License-Identifier: Apache-2.0
"""The provider of any driver, with libcloud's driver of DigitalOcean on a simulated DigitalOcean."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition
from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.any.case import NodesLastingFaults, NodesPassingFaults, VpsCase
from tests.support.clouds.vps import DigitalOcean


class DigitalOceanContractTests(VpsCase, PodProviderContract, TestCase):
    """The contract of all providers."""

    api = DigitalOcean


class DigitalOceanPassingFaultTests(VpsCase, NodesPassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""

    api = DigitalOcean


class DigitalOceanLastingFaultTests(VpsCase, NodesLastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""

    api = DigitalOcean


class CredentialsTests(VpsCase, TestCase):
    """A token that is replaced in its file."""

    api = DigitalOcean

    async def test_a_token_is_replaced_while_the_daemon_runs(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.world.write_credentials(key="another")
        self.assertIn("Unable to authenticate", str(await self.refused(FailedPrecondition, provider.list())))
        self.world.credentials_file.chmod(0o644)
        self.assertIn("chmod 600", str(await self.refused(FailedPrecondition, provider.list())))
        self.world.credentials_file.chmod(0o600)
        self.world.write_credentials(key="secret-of-the-test")
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])

    async def test_an_argument_that_the_driver_does_not_take_stops_the_start(self) -> None:
        self.world.write_credentials(key="secret-of-the-test", token="x")
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        self.assertIn("credentials_file", str(error))
        self.assertNotIn("secret-of-the-test", str(error))
        self.world.write_credentials(key="secret-of-the-test")
        await self.within(provider.start(lambda words: None))
