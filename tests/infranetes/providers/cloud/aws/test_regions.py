# SPDX-License-Identifier: Apache-2.0
"""AWS' regions and partitions."""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.aws import regions
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.regions import Endpoint
from infranetes.providers.cloud.aws.settings import Settings
from tests.support.clouds.agent_processes import ROOT
from tests.support.clouds.aws_policy import POLICY
from tests.support.modules import replaced

HOSTS = {
    "eu-west-1": "ec2.eu-west-1.amazonaws.com",
    "me-south-1": "ec2.me-south-1.amazonaws.com",
    "me-central-1": "ec2.me-central-1.amazonaws.com",
    "il-central-1": "ec2.il-central-1.amazonaws.com",
    "ca-west-1": "ec2.ca-west-1.amazonaws.com",
    "eu-central-2": "ec2.eu-central-2.amazonaws.com",
    "us-gov-east-1": "ec2.us-gov-east-1.amazonaws.com",
    "cn-north-1": "ec2.cn-north-1.amazonaws.com.cn",
    "cn-northwest-1": "ec2.cn-northwest-1.amazonaws.com.cn",
}
PRICE_LISTS = {
    "us-west-2": ("api.pricing.us-east-1.amazonaws.com", "us-east-1"),
    "eu-central-2": ("api.pricing.eu-central-1.amazonaws.com", "eu-central-1"),
    "il-central-1": ("api.pricing.eu-central-1.amazonaws.com", "eu-central-1"),
    "cn-north-1": ("api.pricing.cn-northwest-1.amazonaws.com.cn", "cn-northwest-1"),
}


class RegionTests(SynchronousTestCase):
    def test_each_region_has_its_partitions_host(self) -> None:
        for region, host in HOSTS.items():
            self.assertEqual(regions.ec2(region), Endpoint(host, region))

    def test_prices_are_told_by_few_regions_of_a_partition(self) -> None:
        for region, found in PRICE_LISTS.items():
            self.assertEqual(regions.price_list(region), Endpoint(*found))
        self.assertIsNone(regions.price_list("us-gov-east-1"))
        self.assertEqual([regions.currency(one) for one in ("cn-north-1", "eu-west-1")], ["CNY", "USD"])

    def test_settings_take_any_region_and_no_other_words(self) -> None:
        for region in HOSTS:
            Settings(region=region, image="ami-12345678")
        for word in ("atlantis-1", "eu-west", "eu-west-1.example.com", "EU-WEST-1", "eu-west-1\n"):
            self.assertRaises(ValueError, Settings, region=word, image="ami-12345678")

    def test_a_driver_calls_its_region_and_signs_for_it(self) -> None:
        for region, host in HOSTS.items():
            sent: list[dict[str, Any]] = []
            driver = Driver("AKID", "SECRET", region, token=None, signature_version="4")
            driver.connection.connect()

            def capture(sent: list[dict[str, Any]] = sent, **request: Any) -> None:
                sent.append(request)
                raise ConnectionError

            driver.connection.connection.request = capture
            self.assertRaises(ConnectionError, driver.request, "DescribeAddresses")
            [headers] = [one["headers"] for one in sent]
            self.assertEqual(driver.connection.host, host)
            self.assertIn(f"/{region}/ec2/aws4_request", headers["Authorization"])

    def test_the_policy_is_for_every_partition(self) -> None:
        said = json.dumps(json.loads(POLICY.read_text()))
        self.assertNotIn("arn:aws", said)
        self.assertIn("arn:*:ec2:", said)


class WithoutBotocoreTests(RegionTests):
    """botocore is not installed, or is older than the region."""

    def setUp(self) -> None:
        for module in ("botocore", "botocore.loaders", "botocore.regions"):
            self.patch_module(module)
        self.forget()
        self.addCleanup(self.forget)

    def patch_module(self, name: str) -> None:
        """Make imports of a module fail until the test ends."""
        missing = ExitStack()
        missing.enter_context(replaced(name, None))
        self.addCleanup(missing.close)

    def forget(self) -> None:
        """Forget what botocore has reported."""
        regions._resolver.cache_clear()
        regions._botocore.cache_clear()


class OfferingTests(SynchronousTestCase):
    """What EC2 offers in each region, according to moto's release."""

    def test_the_default_sizes_serve_large_pods_in_each_region_and_are_all_offered(self) -> None:
        defaults = Settings(region="eu-west-1", image="ami-12345678").sizes
        files = sorted((moto_data() / "instance_type_offerings" / "availability-zone").iterdir())
        self.assertGreater(len(files), 25)
        everywhere: set[str] = set()
        for file in files:
            offered = {one["InstanceType"] for one in json.loads(gzip.decompress(file.read_bytes()))}
            found = {name for name in offered if any(fnmatchcase(name, each) for each in defaults)}
            for size in ("large", "xlarge", "8xlarge"):
                lasting = [name for name in found if name.endswith(f".{size}") and not name.startswith("t")]
                self.assertTrue(lasting, f"{file.name}: {size}")
            everywhere |= offered
        for pattern in defaults:
            self.assertTrue(any(fnmatchcase(name, pattern) for name in everywhere), f"none is {pattern}")


def moto_data() -> Path:
    """Return where moto has EC2's data. Debian has no moto, so it may be in a virtual environment."""
    found = sorted((ROOT / ".venv" / "lib").glob("python3*/site-packages/moto/ec2/resources"))
    if found:
        return found[0]
    spec = find_spec("moto")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "ec2" / "resources"
