# SPDX-License-Identifier: Apache-2.0
"""The Azure provider's requests: tags, secrets, addresses, annotations, tokens, and what is left."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.azure.cloud import AzureCloud
from infranetes.providers.cloud.azure.names import Group
from infranetes.providers.cloud.azure.offers import AzureOffers
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind, MachineImage
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes_common import config
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.case import AzureCase
from tests.support.clouds import azure_resources
from tests.support.clouds.azure import ASSERTION
from tests.support.clouds.azure_prices import item
from tests.support.clouds.azure_resources import SUBNET
from tests.support.clouds.faults import NO_AGENT, FaultKind


class LaunchTests(AzureCase, TestCase):
    """The requests of a launch."""

    def setUp(self) -> object:
        result = super().setUp()
        self.world.behaviour = NO_AGENT
        return result

    async def test_all_that_a_pod_costs_has_its_tags_and_ends_with_it(self) -> None:
        self.settings["allow_public_address"] = True
        provider = await self.started()
        spec = self.spec(annotations={"infranetes.io/public-address": "true"})
        instance = await self.running(provider, spec)
        self.assertEqual(set(self.world.held().values()), {spec.token})
        self.assertEqual(len(self.world.held()), 4)
        [body] = self.world.bodies
        disk = body["properties"]["storageProfile"]["osDisk"]
        [reference] = body["properties"]["networkProfile"]["networkInterfaces"]
        options = (disk["deleteOption"], reference["properties"]["deleteOption"])
        self.assertEqual(options, ("Delete", "Delete"))
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])
        await self.until(lambda: not any(self.world.arm.of.values()), "nothing is left of it")

    async def test_the_identity_is_in_the_user_data_and_no_url(self) -> None:
        provider = await self.started()
        spec = self.spec()
        await self.running(provider, spec)
        [body] = self.world.bodies
        document = json.loads(base64.b64decode(body["properties"]["userData"]))
        self.assertIn(spec.identity.key_pem, document.values())
        self.assertNotIn("osProfile", body["properties"])
        self.assertFalse(any(b"PRIVATE" in url or b"secret" in url for url in self.world.urls))

    async def test_what_annotations_ask_for(self) -> None:
        self.settings |= {
            "allowed_images": ["infranetes/*"],
            "allowed_security_groups": ["web", "db"],
            "allowed_instance_profiles": ["reader"],
        }
        provider = await self.started()
        wishes = {
            "infranetes.io/spot": "true",
            "infranetes.io/spot-max-price": "0.05",
            "infranetes.io/security-groups": "web,db",
            "infranetes.io/instance-profile": "reader",
            "infranetes.io/instance-type": "Standard_D2s_v5",
            "infranetes.io/image": "infranetes/pod/1.0.0",
        }
        instance = await self.running(provider, self.spec(annotations=wishes))
        self.assertEqual(instance.size, "Standard_D2s_v5")
        [body], [nic] = self.world.bodies, self.world.nics
        properties = body["properties"]
        self.assertEqual((properties["priority"], properties["evictionPolicy"]), ("Spot", "Deallocate"))
        self.assertEqual(properties["billingProfile"], {"maxPrice": 0.05})
        [identity] = body["identity"]["userAssignedIdentities"]
        self.assertTrue(identity.endswith("/Microsoft.ManagedIdentity/userAssignedIdentities/reader"))
        self.assertTrue(properties["storageProfile"]["imageReference"]["id"].endswith("/versions/1.0.0"))
        [configuration] = nic["properties"]["ipConfigurations"]
        groups = [each["id"] for each in configuration["properties"]["applicationSecurityGroups"]]
        self.assertEqual([id.rpartition("/")[2] for id in groups], ["web", "db"])

    async def test_a_confidential_vm_is_of_a_size_that_makes_no_others(self) -> None:
        kind = {"name": "SecurityType", "value": "TrustedLaunchAndConfidentialVmSupported"}
        self.world.add_image("confidential", {}, {"1.0.0": {}}, hyperVGeneration="V2", features=[kind])
        self.settings |= {"image": "infranetes/confidential", "sizes": ["Standard_D*"]}
        provider = await self.started()
        spec = self.spec(annotations={"infranetes.io/confidential": "sev-snp"})
        instance = await self.running(provider, spec)
        self.assertEqual(instance.size, "Standard_DC2as_v5")
        [body] = self.world.bodies
        profile = {
            "securityType": "ConfidentialVM",
            "uefiSettings": {"secureBootEnabled": True, "vTpmEnabled": True},
        }
        self.assertEqual(body["properties"]["securityProfile"], profile)
        managed = body["properties"]["storageProfile"]["osDisk"]["managedDisk"]
        self.assertEqual(managed["securityProfile"], {"securityEncryptionType": "VMGuestStateOnly"})
        other = await self.within(provider.launch(self.spec()))
        self.assertEqual(other.size, "Standard_D2s_v5")
        self.assertNotIn("securityProfile", self.world.bodies[-1]["properties"])

    async def test_an_image_that_makes_no_confidential_vms_has_no_size_for_them(self) -> None:
        provider = await self.started()
        spec = self.spec(annotations={"infranetes.io/confidential": "sev-snp"})
        error = await self.refused(InvalidArgument, provider.launch(spec))
        self.assertIn("confidential by sev-snp", str(error))
        self.assertEqual((self.world.bodies, self.world.holdings()), ([], []))

    async def test_an_address_of_somebodys_own_outlives_the_vm(self) -> None:
        ours = azure_resources.address("mine", {"properties": {}}, "203.0.113.9")
        self.world.arm.of["publicIPAddresses"]["mine"] = ours
        self.settings["allowed_elastic_addresses"] = ["mine"]
        provider = await self.started()
        instance = await self.running(
            provider, self.spec(annotations={"infranetes.io/elastic-address": "mine"})
        )
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), ["address mine"])
        await self.until(lambda: not self.world.arm.of["virtualMachines"], "the VM is gone")
        self.assertEqual(self.world.holdings(), ["address mine"])
        del self.world.arm.of["publicIPAddresses"]["mine"]

    async def test_unsupported_annotations_are_named(self) -> None:
        self.settings["allowed_elastic_addresses"] = ["*"]
        provider = await self.started()
        for name, value in (
            ("infranetes.io/region", "eastus"),
            ("infranetes.io/image", "ami-1"),
            ("infranetes.io/subnet", "Subnet_1"),
            ("infranetes.io/security-groups", "a/b"),
            ("infranetes.io/elastic-address", "nowhere"),
            ("infranetes.io/instance-profile", "a/b"),
            ("infranetes.io/instance-type", "Standard_NC4as_T4_v3"),  # not among the allowed sizes
        ):
            error = await self.refused(InvalidArgument, provider.launch(self.spec(annotations={name: value})))
            self.assertIn(name, str(error))
        self.assertEqual((self.world.bodies, self.world.holdings()), ([], []))

    async def test_missing_resources_are_reported_at_the_start(self) -> None:
        self.world.add_image("generalized", {}, {}, osState="Generalized")
        for key, value, words in (
            ("image", "infranetes/nothing", "has no image infranetes/nothing"),
            ("image", "infranetes/generalized", "--os-state Specialized"),
            ("subnet", "cluster/nowhere", "has no subnet cluster/nowhere"),
        ):
            good = self.settings[key]
            self.settings[key] = value
            error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
            self.assertIn(words, str(error))
            self.settings[key] = good

    async def test_a_read_that_fails_within_azure_is_made_once_more(self) -> None:
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        instance = await self.running(provider, self.spec())
        looks: Mapping[str, Callable[[], Awaitable[object]]] = {
            "list resources": provider.list,
            "get virtualMachines": lambda: provider.get(instance.id),
            "list VMs": provider._watcher.poll,
            "list states": provider._watcher.poll,
        }
        for action, look in looks.items():
            fault = self.world.faults.add(FaultKind.ERROR, action, times=1)
            failed = provider.status()["calls"].partition(",")[2]
            await look()
            self.assertEqual(fault.happened, 1, action)
            self.assertEqual(provider.status()["calls"].partition(",")[2], failed)

    async def test_a_list_at_rest_is_one_read_whatever_else_the_group_holds(self) -> None:
        """Compute's lists, of which it serves few, would show the VMs of all nodes."""
        self.settings["watch_seconds"] = 60.0
        provider, other = await self.started(), await self.started(node="node-2")
        mine = await self.running(provider, self.spec())
        others = await self.running(other, self.spec(node="node-2"))
        await self.within(provider.list())
        begun = len(self.world.requests)
        self.assertEqual([one.id for one in await self.within(provider.list())], [mine.id])
        self.assertEqual([one["Action"] for one in self.world.requests[begun:]], ["list resources"])
        await self.within(other.destroy(others.id))

    async def test_the_next_daemon_looks_at_each_vm_once(self) -> None:
        self.settings["watch_seconds"] = 60.0
        provider = await self.started()
        running = [await self.running(provider, self.spec()) for _ in range(2)]
        await self.within(provider.stop())
        begun = len(self.world.requests)
        provider = await self.started()
        for _ in range(3):
            listed = await self.within(provider.list())
        self.assertEqual(
            {(one.id, one.address) for one in listed}, {(one.id, one.address) for one in running}
        )
        asked = [one["Action"] for one in self.world.requests[begun:]]
        self.assertEqual((asked.count("get virtualMachines"), asked.count("list VMs")), (2, 0))

    async def test_what_resource_manager_still_names_is_looked_at(self) -> None:
        """It may lag behind: a VM that was destroyed is not taken for one that runs."""
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.within(provider.list())
        self.world.faults.add(FaultKind.STALE, "list resources")
        await self.within(provider.destroy(instance.id))
        await self.until(lambda: not self.world.held(), "Azure has deleted it")
        for _ in range(3):
            self.assertEqual(await self.within(provider.list()), [])

    async def test_long_lists_have_several_pages(self) -> None:
        self.world.arm.page = 2
        provider = await self.started()
        for _ in range(3):
            await self.running(provider, self.spec())
        listed = await self.within(provider.list())
        self.assertEqual([one.state for one in listed], [InstanceState.RUNNING] * 3)


class LeftTests(AzureCase, TestCase):
    """What a launch could leave behind."""

    def setUp(self) -> object:
        result = super().setUp()
        self.world.behaviour = NO_AGENT
        self.settings["sweep_seconds"] = 0.2
        return result

    async def test_a_daemon_that_is_killed_after_each_request_leaves_nothing(self) -> None:
        self.settings["allow_public_address"] = True
        for action in ("create address", "create network interface", "launch"):
            provider = await self.started()
            untold = self.world.faults.add(FaultKind.LOST, action)
            spec = self.spec(annotations={"infranetes.io/public-address": "true"})
            launching = self.assertFailure(provider.launch(spec), Unavailable)
            while not untold.happened:
                await self.sleep(0.02)
            await self.within(provider.stop())
            await launching
            self.world.faults.clear()
            self.assertNotEqual(self.world.holdings(), [], action)
            provider = await self.started()
            for one in await self.within(provider.list()):
                await self.within(provider.destroy(one.id))
            await self.until(lambda: not self.world.holdings(), "it is swept")
            await self.within(provider.stop())

    async def test_a_step_that_was_taken_is_not_taken_again(self) -> None:
        self.world.faults.add(FaultKind.LOST, "launch", times=1)
        self.world.faults.add(FaultKind.ERROR, "get virtualMachines", times=3)
        provider = await self.started()
        await self.running(provider, self.spec())
        self.assertEqual((len(self.world.nics), len(self.world.bodies)), (1, 2))

    async def test_an_interface_that_was_swept_is_made_again(self) -> None:
        self.settings.update(retry_first=0.2, retry_most=0.2, retry_seconds=0.3)
        provider = await self.started()
        self.world.faults.add(FaultKind.ERROR, "launch")
        spec = self.spec()
        await self.refused(Unavailable, provider.launch(spec))
        await self.until(lambda: not self.world.holdings(), "it is swept")
        self.world.faults.clear()
        instance = await self.running(provider, spec)
        self.assertEqual((len(self.world.nics), self.world.running()), (2, [instance.id]))

    async def test_a_refused_launch_leaves_no_interface(self) -> None:
        self.settings |= {"sweep_seconds": 600.0, "allow_public_address": True}
        provider = await self.started()
        self.world.faults.add(FaultKind.QUOTA, "launch")
        spec = self.spec(annotations={"infranetes.io/public-address": "true"})
        await self.refused(ResourceExhausted, provider.launch(spec))
        self.assertEqual(len(self.world.nics), 1)
        self.assertEqual(self.world.holdings(), [])

    async def test_an_interface_that_azure_still_reserves_is_swept(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.QUOTA, "launch")
        spec = self.spec()
        self.world.arm.reserved.add(f"infranetes-{spec.token}-0")
        await self.refused(ResourceExhausted, provider.launch(spec))
        self.assertEqual(len(self.world.holdings()), 1)
        self.world.arm.reserved.clear()
        await self.until(lambda: not self.world.holdings(), "it is swept")

    async def test_what_has_not_all_of_our_tags_is_left_alone(self) -> None:
        ours = {"infranetes-cluster": self.cluster, "infranetes-node": self.node}
        disks = {
            "mine": {**ours, "infranetes-token": "f" * 32},
            "volume": ours,
            "theirs": {**ours, "infranetes-token": "f" * 32, "infranetes-node": "other"},
            "nobodys": {},
        }
        for name, tags in disks.items():
            self.world.arm.of["disks"][name] = azure_resources.disk(name, tags)
        await self.started()
        await self.until(lambda: "disk mine" not in self.world.holdings(), "it is swept")
        await self.sleep(0.5)
        self.assertEqual(sorted(self.world.arm.of["disks"]), ["nobodys", "theirs", "volume"])
        self.world.arm.of["disks"].clear()

    async def test_a_launch_that_azure_fails_to_make_is_tried_elsewhere(self) -> None:
        provider = await self.started()
        self.world.refusal = ("InternalExecutionError", "An internal execution error occurred.")
        self.world.faults.add(FaultKind.CAPACITY, "launch", times=1)
        instance = await self.running(provider, self.spec())
        self.assertEqual(instance.zone, azure_resources.ZONES[1])
        self.assertEqual(self.world.running(), [instance.id])


class PriceTests(AzureCase, TestCase):
    """The prices of sizes decide which is tried first."""

    def setUp(self) -> object:
        result = super().setUp()
        self.world.behaviour = NO_AGENT
        return result

    async def test_the_cheapest_that_fits_is_launched_and_its_cost_is_known(self) -> None:
        prices = {"Standard_D2s_v5": 0.2, "Standard_D4s_v5": 0.1}
        self.world.prices.items = [item(name, price) for name, price in prices.items()]
        provider = await self.started()
        instance = await self.within(provider.launch(self.spec(size=Size(cpu_millis=2000))))
        self.assertEqual((instance.size, instance.cost_per_hour), ("Standard_D4s_v5", 0.1))

    async def test_they_are_asked_for_once_and_kept(self) -> None:
        provider = await self.started()
        asked = self.world.prices.asked
        self.assertEqual(asked, 2)  # pages
        await self.restarted(provider)
        self.assertEqual(self.world.prices.asked, asked)
        self.assertEqual([one["Action"] for one in self.world.requests].count("get skus"), 1)

    async def test_without_prices_the_smallest_is_launched(self) -> None:
        self.world.prices.broken = True
        provider = await self.started()
        instance = await self.within(provider.launch(self.spec(size=Size(cpu_millis=2000))))
        self.assertEqual((instance.size, instance.cost_per_hour), ("Standard_D2s_v5", None))

    async def test_without_sizes_it_does_not_start(self) -> None:
        self.world.faults.add(FaultKind.UNKNOWN, "get skus")
        provider = self.make_provider()
        error = await self.refused(Unavailable, provider.start(lambda words: None))
        self.assertIn("no sizes are known", str(error))
        self.world.faults.clear()


class EndTests(AzureCase, TestCase):
    """How VMs end."""

    async def test_an_evicted_spot_vm_says_so(self) -> None:
        self.world.behaviour = NO_AGENT
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec(annotations={"infranetes.io/spot": "true"}))
        self.world.evict(instance.id)
        await self.until(lambda: ended, "the eviction is told")
        self.assertIs(ended[0].state, InstanceState.ENDED)
        error = await self.refused(Unavailable, provider.wait_running(instance.id, 1.0))
        self.assertIn("preempted", str(error))
        self.assertIn("Welcome to the guest", str(error))


class CredentialTests(AzureCase, TestCase):
    """How the node authenticates to Azure."""

    async def tokens(self) -> int:
        provider = await self.started()
        await self.within(provider.list())
        await self.within(provider.stop())
        return [one["Action"] for one in self.world.requests].count("token")

    async def test_one_token_serves_all_threads(self) -> None:
        self.assertEqual(await self.tokens(), 1)

    async def test_a_managed_identity(self) -> None:
        for key in ("tenant", "secret_file"):
            del self.settings[key]
        self.assertEqual(await self.tokens(), 1)
        del self.settings["client_id"]
        self.assertEqual(await self.tokens(), 2)

    async def test_a_token_of_another_issuer(self) -> None:
        file = self.run_dir / "token"
        file.touch(mode=0o600)
        file.write_text(f"{ASSERTION}\n")
        del self.settings["secret_file"]
        self.settings["federated_token_file"] = str(file)
        self.assertEqual(await self.tokens(), 1)

    async def test_a_token_that_is_refused_is_replaced_at_once(self) -> None:
        provider = await self.started()
        self.world.revoke_tokens()
        self.assertEqual(await self.within(provider.list()), [])

    async def test_a_secret_that_is_wrong_or_that_others_may_read_is_refused_unseen(self) -> None:
        file = self.world.secret_file
        good = file.read_text()
        file.write_text("hush")
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("AADSTS7000215", str(error))
        self.assertNotIn("hush", str(error))
        file.chmod(0o644)
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("chmod 600", str(error))
        file.chmod(0o600)
        file.write_text(good)


class CloudTestCase(AzureCase):
    """A cloud without a provider."""

    def cloud(self) -> AzureCloud:
        settings = config.structure(self.settings, Settings, source="test")
        group = Group(settings.subscription, settings.resource_group)
        book = OfferBook(self.state_dir / "offers.json", AzureOffers(settings, group), {})
        return AzureCloud(settings, self.context(), book)


class ImageTests(CloudTestCase, TestCase):
    """Finding machine images."""

    async def found(self, work: Any) -> Any:
        """Return the result of calling `work` with a cloud and a driver."""
        cloud = self.cloud()
        return await run_in_thread(reactor, lambda: work(cloud, cloud._thd_connect(5.0)))

    async def test_the_newest_usable_version_is_found(self) -> None:
        tags = {"infranetes": "true", "infranetes-image-name": "web"}
        old, new = ({"infranetes": "true", "infranetes-image-version": each} for each in ("1.0", "1.1"))
        image = self.world.add_image("web", tags, {"1.0.0": old, "1.0.1": old, "1.0.2": old, "1.1.0": new})
        self.world.arm.versions[f"{image}/versions/1.0.2"]["properties"]["provisioningState"] = "Failed"
        self.world.add_image("arm", tags, {"9.0.0": old}, architecture="Arm64")
        self.world.add_image("generalized", tags, {"9.0.0": old}, osState="Generalized")
        found = await self.found(lambda cloud, driver: cloud._thd_find_image(driver, "web", "1.0"))
        id = f"{image}/versions/1.0.1".lstrip("/")
        self.assertEqual(found, MachineImage(id, "web", "1.0", 8 << 30))
        self.assertTrue(await self.found(lambda cloud, driver: cloud._thd_has_image(driver, id)))
        del self.world.arm.versions[f"/{id}"]
        for gone in (id, "x/../y", "infranetes/nothing"):
            there = await self.found(lambda cloud, driver, gone=gone: cloud._thd_has_image(driver, gone))
            self.assertFalse(there)

    async def test_a_missing_image_error_says_what_was_looked_for(self) -> None:
        def look(cloud: Any, driver: Any) -> Any:
            try:
                return cloud._thd_find_image(driver, "web", "1.0")
            except CloudError as error:
                return error

        error = await self.found(look)
        self.assertIs(error.kind, ErrorKind.NOT_FOUND)
        self.assertIn("infranetes-image-name=web", str(error))


class RoleTests(CloudTestCase, TestCase):
    """What the manual's roles do not grant is refused."""

    async def test_a_subnet_that_the_node_may_not_use(self) -> None:
        path = SUBNET.replace("/subnets/", "/virtualNetworkPeerings/")
        driver: Any = await self.found_driver()
        error = await run_in_thread(reactor, lambda: _refused(driver, path))
        self.assertIs(error.kind, ErrorKind.CREDENTIALS)
        self.assertIn("Microsoft.Network/virtualNetworks/virtualNetworkPeerings/read", str(error))

    async def found_driver(self) -> Any:
        cloud = self.cloud()
        return await run_in_thread(reactor, lambda: cloud._thd_connect(5.0))


def _refused(driver: Any, path: str) -> Any:
    from infranetes.providers.cloud.azure.errors import AzureError, classify

    try:
        driver._request("GET", path, {"api-version": "2024-10-01"})
    except AzureError as error:
        return classify(error)
