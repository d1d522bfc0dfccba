# SPDX-License-Identifier: Apache-2.0
"""Parts of the Azure provider that need no cloud: names, errors, states, sizes, settings."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import registry
from infranetes.providers.cloud.azure import errors, names
from infranetes.providers.cloud.azure.cloud import AzureCloud
from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.offers import AzureOffers
from infranetes.providers.cloud.azure.prices import Item, price_of, prices_of
from infranetes.providers.cloud.azure.resources import Sku, Status, VmProperties
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.azure.sizes import Requirements, offers
from infranetes.providers.cloud.azure.states import state_of
from infranetes.providers.cloud.interface import Cloud, ErrorKind
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor
from tests.support.clouds import azure_resources
from tests.support.clouds.azure_prices import item
from tests.support.clouds.azure_resources import LOCATION, SUBSCRIPTION

CONTEXT = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "c", "n")
GOOD = {
    "subscription": SUBSCRIPTION,
    "resource_group": "pods",
    "location": LOCATION,
    "image": "infranetes/pod",
    "subnet": "cluster/pods",
}
PENDING, RUNNING, ENDED = InstanceState.PENDING, InstanceState.RUNNING, InstanceState.ENDED


class NameTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.group = names.Group(SUBSCRIPTION, "pods")

    def test_a_resource_is_given_by_its_name_or_by_its_id(self) -> None:
        elsewhere = f"subscriptions/{SUBSCRIPTION}/resourceGroups/net/providers/Microsoft.Network"
        kind = "Microsoft.Network/networkSecurityGroups"
        self.assertEqual(self.group.named(kind, "nsg"), f"{self.group.path}/providers/{kind}/nsg")
        id = f"/{elsewhere}/networkSecurityGroups/nsg"
        for text in (id, id.lstrip("/")):
            self.assertEqual(self.group.named(kind, text), id)
        subnet = f"{self.group.path}/providers/Microsoft.Network/virtualNetworks/cluster/subnets/pods"
        for text in ("cluster/pods", subnet):
            self.assertEqual(self.group.subnet(text), subnet)

    def test_the_newest_version_of_an_image_has_none_in_its_id(self) -> None:
        image = f"{self.group.path}/providers/Microsoft.Compute/galleries/g/images/i"
        for text in ("g/i", "g/i/latest", image, f"{image}/versions/latest"):
            self.assertEqual(self.group.image(text), image)
        version = self.group.image("g/i/1.2.3")
        self.assertEqual(version, f"{image}/versions/1.2.3")
        self.assertEqual(names.definition_of(version), image)

    def test_ids_are_held_in_a_group_however_they_are_spelled(self) -> None:
        self.assertTrue(self.group.holds(self.group.resource("X/y", "z").replace("pods", "PODS")))
        self.assertFalse(self.group.holds("/subscriptions/x/resourceGroups/podsies/providers/X/y/z"))

    def test_a_volume_has_one_name_whatever_it_is_called(self) -> None:
        made = {
            names.hashed_name_of(kind, cluster, name)
            for kind in ("volume", "snapshot")
            for cluster, name in (("a", "b c"), ("a b", "c"), ("a", "B c"), ("a", "../b"), ("a", "ü" * 64))
        }
        self.assertEqual(len(made), 10)
        self.assertTrue(all(names.is_name(name) and not names.is_id(name) for name in made))
        for text in ("", "a/b", "../b", "-a", "a" * 81, "a?b", "a\n"):
            self.assertFalse(names.is_name(text), text)

    def test_ids_are_what_vms_are_called_and_nothing_else(self) -> None:
        self.assertTrue(names.is_id(names.name_of("0123456789abcdef" * 2, 3)))
        for text in ("", "web", "infranetes-x", "infranetes-x-1/../y", "infranetes-X-1", "infranetes-x-1\n"):
            self.assertFalse(names.is_id(text), text)


class ErrorTests(SynchronousTestCase):
    def kind(self, status: int, code: str, message: str = "", **headers: str) -> ErrorKind:
        found = errors.classify(errors.AzureError(status, code, message, headers))
        assert found is not None
        self.assertIn(message, str(found))
        return found.kind

    def test_by_their_codes(self) -> None:
        for code, kind in (
            ("SubscriptionRequestsThrottled", ErrorKind.THROTTLED),
            ("RetryableError", ErrorKind.TRANSIENT),
            ("ZonalAllocationFailed", ErrorKind.CAPACITY),
            ("SkuNotAvailable", ErrorKind.CAPACITY),
            ("QuotaExceeded", ErrorKind.QUOTA),
            ("SubnetIsFull", ErrorKind.QUOTA),
            ("LinkedAuthorizationFailed", ErrorKind.CREDENTIALS),
            ("PreconditionFailed", ErrorKind.CONFLICT),
            ("NicReservedForAnotherVm", ErrorKind.STATE),
            ("InvalidParameter", ErrorKind.INVALID),
        ):
            self.assertIs(self.kind(409, code), kind, code)

    def test_what_is_not_allowed_is_so_by_a_quota_or_by_a_state(self) -> None:
        quota = "Operation could not be completed as it results in exceeding approved Total Cores Quota."
        self.assertIs(self.kind(409, "OperationNotAllowed", quota), ErrorKind.QUOTA)
        for name, kind in (
            ("standardDSv5Family", ErrorKind.FAMILY_QUOTA),
            ("Standard NCASv3_T4 Family", ErrorKind.FAMILY_QUOTA),
            ("Total Regional", ErrorKind.QUOTA),
            ("LowPriority", ErrorKind.QUOTA),
        ):
            words = quota.replace("Total Cores Quota", f"{name} Cores quota")
            for code in ("OperationNotAllowed", "QuotaExceeded"):
                self.assertIs(self.kind(409, code, words), kind, name)
        self.assertIs(self.kind(409, "OperationNotAllowed", "The VM is being deleted."), ErrorKind.STATE)

    def test_by_their_status_if_their_code_is_not_known(self) -> None:
        for status, kind in (
            (429, ErrorKind.THROTTLED),
            (500, ErrorKind.TRANSIENT),
            (403, ErrorKind.CREDENTIALS),
            (404, ErrorKind.NOT_FOUND),
            (400, ErrorKind.INVALID),
        ):
            self.assertIs(self.kind(status, "SomethingNew"), kind)
        self.assertIs(self.kind(429, "OperationNotAllowed", "quota"), ErrorKind.THROTTLED)

    def test_how_long_not_to_call(self) -> None:
        found = errors.classify(errors.AzureError(429, "TooManyRequests", "", {"retry-after": "17"}))
        assert found is not None
        self.assertEqual(found.retry_after, 17.0)
        self.assertIs(errors.classify(ValueError()), None)


class StateTests(SynchronousTestCase):
    def state(self, provisioning: str, power: str = "", **properties: Any) -> tuple[InstanceState, str]:
        known = {"provisioningState": provisioning, **properties}
        statuses: list[Status] = [{"code": f"ProvisioningState/{provisioning.lower()}"}]
        if power:
            statuses.append({"code": f"PowerState/{power}"})
        return state_of(cast(VmProperties, known), statuses)

    def test_each_row_of_the_table(self) -> None:
        for provisioning, power, expected in (
            ("Creating", "running", RUNNING),
            ("Creating", "stopped", PENDING),
            ("Creating", "", PENDING),
            ("Failed", "running", RUNNING),
            ("Failed", "stopped", ENDED),
            ("Failed", "", ENDED),
            ("Deleting", "running", ENDED),
            ("Succeeded", "running", RUNNING),
            ("Updating", "running", RUNNING),
            ("Succeeded", "stopped", ENDED),
            ("Succeeded", "deallocated", ENDED),
            ("Succeeded", "stopping", PENDING),
            ("Succeeded", "deallocating", PENDING),
            ("Succeeded", "starting", PENDING),
            ("Succeeded", "", PENDING),
        ):
            self.assertIs(self.state(provisioning, power)[0], expected, f"{provisioning} {power}")

    def test_a_failure_of_which_nothing_is_known_is_no_end(self) -> None:
        self.assertIs(state_of({"provisioningState": "Failed"}, ())[0], PENDING)

    def test_why_it_has_ended(self) -> None:
        self.assertIn("preempted", self.state("Succeeded", "deallocated", priority="Spot")[1])
        self.assertEqual(self.state("Succeeded", "deallocated")[1], "it is deallocated")
        failed: Status = {"code": "ProvisioningState/failed/AllocationFailed", "message": "no room"}
        self.assertIn("AllocationFailed: no room", state_of({"provisioningState": "Failed"}, [failed])[1])


class SizeTests(SynchronousTestCase):
    def found(self, generation: str = "V1", **changes: Any) -> dict[str, Any]:
        skus = [cast(Sku, {**each, **changes}) for each in azure_resources.skus()]
        requirements = Requirements(LOCATION, generation, premium=True, zonal=True)
        return {each.name: each for each in offers(skus, requirements)}

    def test_what_boots_the_image_and_may_be_had(self) -> None:
        usable = {"Standard_B1ls", "Standard_B1s", "Standard_B2s", "Standard_D2s_v5", "Standard_D4s_v5"}
        usable |= {"Standard_D8s_v5", "Standard_NC4as_T4_v3"}
        self.assertEqual(set(self.found()), usable)
        self.assertEqual(set(self.found("V2")), usable | {"Standard_D2ps_v5"})

    def test_what_a_size_has(self) -> None:
        found = self.found("V2")
        size = found["Standard_D4s_v5"]
        self.assertEqual((size.cpu_millis, size.memory_bytes), (4000, 16 << 30))
        self.assertEqual((size.zones, size.shared_cpus), (azure_resources.ZONES, 0))
        shared = found["Standard_B2s"]
        self.assertEqual((shared.cpu_millis, shared.shared_cpus), (400, 2))
        self.assertEqual(found["Standard_NC4as_T4_v3"].gpus, 1)
        self.assertEqual(found["Standard_D2ps_v5"].architecture, "arm64")

    def test_zones_that_a_subscription_may_not_use(self) -> None:
        restriction = {"type": "Zone", "restrictionInfo": {"locations": [LOCATION], "zones": ["1"]}}
        found = self.found(restrictions=[restriction])
        self.assertEqual(found["Standard_D4s_v5"].zones, azure_resources.ZONES[1:])
        self.assertNotIn("Standard_D8s_v5", found)

    def test_they_take_the_disks_of_vms_and_of_volumes(self) -> None:
        small = "Standard_B1ls"

        class Answers:
            def image(self, id: str) -> dict[str, Any]:
                return {"properties": {"hyperVGeneration": "V1"}}

            def skus(self, location: str) -> list[dict[str, Any]]:
                found = azure_resources.skus()
                for capability in found[0]["capabilities"]:
                    if capability["name"] == "PremiumIO":
                        capability["value"] = "False"
                return found

        for table, is_usable in (
            ({}, True),
            ({"volume_type": "StandardSSD_ZRS"}, True),
            ({"volume_type": "PremiumV2_LRS"}, False),
            ({"disk_type": "Premium_LRS"}, False),
        ):
            settings = structure({**GOOD, **table}, Settings, source="test")
            source = AzureOffers(settings, names.Group(SUBSCRIPTION, "pods"))
            usable = {each.name for each in source._thd_types(cast(Driver, Answers()))}
            self.assertEqual((small in usable, "Standard_B1s" in usable), (is_usable, True), table)

    def test_without_zones_they_do_not_matter(self) -> None:
        skus = [cast(Sku, {**each, "locationInfo": []}) for each in azure_resources.skus()]
        found = offers(skus, Requirements(LOCATION, "V1", premium=False, zonal=False))
        self.assertEqual({each.zones for each in found}, {()})
        self.assertEqual(offers(skus, Requirements(LOCATION, "V1", premium=False, zonal=True)), [])


# Azure's answers for eastus and, the last two, westeurope, as others have published them from 2021 to 2026:
# sizes, prices, and whether their meter is the primary one.
ANSWERED = (
    ("Standard_B1s", 0.0104, True),
    ("Standard_D2s_v3", 0.096, False),
    ("Standard_E16_v3", 1.008, True),
    ("Standard_E16-4s_v3", 1.008, False),
    ("Standard_E16-8s_v3", 1.008, False),
    ("Standard_E16s_v3", 1.008, False),
    ("Standard_E32_v3", 2.016, True),
    ("Standard_E32s_v3", 2.016, False),
    ("Standard_D8_v4", 0.46, True),
    ("Standard_E4ds_v4", 0.346, True),
)
PRIMARY = ((0.2, False), (0.1, True), (0.115, True))  # prices, and whether their meter is the primary one


class PriceTests(SynchronousTestCase):
    def test_of_linux_on_demand_alone(self) -> None:
        size = "Standard_D2s_v5"
        self.assertEqual(price_of(cast(Item, item(size, 0.1))), 0.1)
        others: tuple[dict[str, object], ...] = (
            {"productName": "Virtual Machines Dsv5 Series Windows"},
            {"productName": "Dsv5 Series Cloud Services"},
            {"skuName": "D2s v5 Spot"},
            {"meterName": "D2s v5 Low Priority"},
            {"type": "Reservation"},
            {"unitOfMeasure": "1 GB/Month"},
            {"currencyCode": "EUR"},
            {"armSkuName": ""},
        )
        for other in others:
            self.assertIs(price_of(cast(Item, item(size, 0.1, **other))), None, other)

    def test_ten_sizes(self) -> None:
        """One meter may count several of them, and is the primary one of only one of them, or of none."""
        items = [item(size, price, isPrimaryMeterRegion=primary) for size, price, primary in ANSWERED]
        size = "Standard_D2s_v3"
        items += [
            item(size, 0.188, productName="Virtual Machines DSv3 Series Windows", isPrimaryMeterRegion=False),
            item(size, 0.018816, skuName="D2s v3 Spot", meterName="D2s v3 Spot"),
            item(size, 0.019, skuName="D2s v3 Low Priority", isPrimaryMeterRegion=False),
        ]
        expected = {size: price for size, price, _ in ANSWERED}
        self.assertEqual(prices_of(cast(list[Item], items)), expected)

    def test_a_primary_meter_goes_before_others(self) -> None:
        size = "Standard_D2s_v5"
        items = [item(size, price, isPrimaryMeterRegion=primary) for price, primary in PRIMARY]
        for order in itertools.permutations(items):
            self.assertEqual(prices_of(cast(list[Item], order)), {size: 0.115})


class SettingsTests(SynchronousTestCase):
    def test_it_is_a_cloud(self) -> None:
        settings = structure(GOOD, Settings, source="test")
        book = OfferBook(Path("/nonexistent"), AzureOffers(settings, names.Group("s", "g")), {})
        cloud: Cloud[Any] = AzureCloud(settings, CONTEXT, book)
        self.assertIsInstance(cloud, Cloud)
        self.assertEqual(registry.create(cast(IReactor, Clock()), "azure", GOOD, CONTEXT).name, "azure")

    def test_what_is_wrong_is_named(self) -> None:
        secret = {"secret_file": "/x"}
        for table, words in (
            ({key: each for key, each in GOOD.items() if key != "subnet"}, "subnet"),
            ({**GOOD, "subscription": "mine"}, "subscription"),
            ({**GOOD, "image": "pod"}, "image"),
            ({**GOOD, "zones": ["westeurope-1"]}, "zones"),
            ({**GOOD, "disk_type": "floppy"}, "disk_type"),
            ({**GOOD, "volume_type": "UltraSSD_LRS"}, "volume_type"),
            ({**GOOD, "endpoint": "ftp://x"}, "endpoint"),
            ({**GOOD, **secret}, "tenant"),
            ({**GOOD, **secret, "federated_token_file": "/y"}, "exclude each other"),
        ):
            error = self.assertRaises(ConfigError, registry.create, Clock(), "azure", table, CONTEXT)
            self.assertIn(words, str(error))
