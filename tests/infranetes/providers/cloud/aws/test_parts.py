# SPDX-License-Identifier: Apache-2.0
"""Parts of the AWS provider that need no cloud: its interface, settings, signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import registry
from infranetes.providers.cloud.aws.cloud import AwsCloud
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.offers import AwsOffers
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.interface import Cloud
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.errors import ConfigError
from tests.support.clouds import sigv4

CONTEXT = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "c", "n")


class AwsTests(SynchronousTestCase):
    settings = Settings(region="eu-west-1", image="ami-12345678")

    def test_it_is_a_cloud(self) -> None:
        cloud: Cloud[Driver] = AwsCloud(
            self.settings, CONTEXT, OfferBook(Path("/nonexistent"), AwsOffers(self.settings), {})
        )
        self.assertIsInstance(cloud, Cloud)

    def test_wrong_settings_are_named(self) -> None:
        good = {"region": "eu-west-1", "image": "ami-12345678"}
        for key, value in (
            ("region", "atlantis-1"),
            ("image", "debian"),
            ("endpoint", "ftp://here"),
            ("threads", 0),
            ("secret_key", "alone"),
            ("agent_port", 70000),
            ("subnet", "subnet-1"),
            ("disk_type", "st1"),  # nothing boots from it
            ("disk_iops", 4000),  # without a disk type
            ("disk_throughput", 250),
            ("disk_iops", -1),
        ):
            table = {**good, key: value}
            error = self.assertRaises(ConfigError, registry.create, Clock(), "aws", table, CONTEXT)
            self.assertIn(key, str(error))
            self.assertNotIn("alone", str(error))

    def test_only_some_types_of_disks_have_operations_and_throughput_of_ones_own(self) -> None:
        for type, iops, throughput, wrong in (
            ("", 0, 0, ""),
            ("gp3", 0, 0, ""),
            ("gp3", 4000, 250, ""),
            ("gp2", 4000, 0, "disk_iops"),
            ("gp2", 0, 250, "disk_throughput"),
            ("io2", 4000, 0, ""),
            ("io2", 0, 0, "disk_iops"),
            ("io2", 4000, 250, "disk_throughput"),
        ):
            disk = {"disk_type": type, "disk_iops": iops, "disk_throughput": throughput}
            table = {"region": "eu-west-1", "image": "ami-12345678", **disk}
            if wrong:
                error = self.assertRaises(ConfigError, config.structure, table, Settings, source="test")
                self.assertIn(wrong, str(error))
            else:
                self.assertEqual(config.structure(table, Settings, source="test").disk_type, type)

    def test_a_posted_form_is_signed_as_aws_own_library_signs_it(self) -> None:
        """libcloud only signs GET requests to EC2; botocore's signature is the reference."""
        sent: list[dict[str, object]] = []
        driver = Driver("AKID", "SECRET", region="eu-west-1", token="TOKEN", signature_version="4")
        connection = driver.connection
        connection.connect()

        def capture(**request: Any) -> None:
            sent.append(request)
            raise ConnectionError

        connection.connection.request = capture
        self.assertRaises(ConnectionError, driver.request, "DescribeAddresses", Domain="vpc & more")
        [request] = sent
        self.assertEqual((request["method"], request["url"]), ("POST", "/"))
        signature = sigv4.of(request, "ec2", "eu-west-1")
        self.assertEqual(signature.sent, signature.expected)
        self.assertIn("x-amz-security-token", signature.headers)
        self.assertIn("Version=2016-11-15", str(request["body"]))

    def test_settings_show_no_secret(self) -> None:
        shown = repr(attrs.evolve(self.settings, access_key="AK", secret_key="hush"))
        self.assertNotIn("hush", shown)
