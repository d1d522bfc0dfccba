# SPDX-License-Identifier: Apache-2.0
"""The GCP provider's requests: labels, secrets, addresses, annotations, tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.gcp.cloud import GcpCloud
from infranetes.providers.cloud.gcp.offers import GcpOffers
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind, MachineImage
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes_common import config
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from tests.contract.pod_provider_case import reactor
from tests.harness.needs import needs_mounts
from tests.infranetes.providers.cloud.case import GcpCase
from tests.support.clouds import google_identity
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce_resources import ZONES
from tests.support.clouds.google_identity import ACCOUNT, POOL


class LaunchTests(GcpCase, TestCase):
    """The requests of one launch."""

    def actions(self, begun: int = 0) -> list[str]:
        return [one["Action"] for one in self.world.requests[begun:]]

    def identity(self, body: dict[str, Any]) -> Any:
        items = {each["key"]: each["value"] for each in body["metadata"]["items"]}
        self.assertEqual(items["block-project-ssh-keys"], "TRUE")
        return json.loads(items["infranetes-identity"])

    async def test_everything_is_labelled_when_it_is_created(self) -> None:
        provider = await self.started()
        spec = self.spec()
        await self.within(provider.launch(spec))
        expected = {
            "infranetes-cluster": self.cluster,
            "infranetes-node": self.node,
            "infranetes-sandbox": spec.sandbox_id,
            "infranetes-token": spec.token,
        }
        [body] = self.world.bodies
        [disk] = body["disks"]
        self.assertEqual(body["labels"], expected)
        self.assertEqual(disk["initializeParams"]["labels"], expected)
        self.assertIs(disk["autoDelete"], True)
        self.assertEqual(body["tags"], {"items": ["infranetes"]})
        self.assertEqual(body["serviceAccounts"], [])
        self.assertEqual(body["scheduling"], {"automaticRestart": False, "onHostMaintenance": "MIGRATE"})
        self.assertNotIn("accessConfigs", body["networkInterfaces"][0])

    async def test_names_that_are_no_valid_labels(self) -> None:
        provider = await self.started(cluster="Prod.Größe", node="node-1.example.org")
        spec = self.spec(cluster="Prod.Größe", node="node-1.example.org")
        instance = await self.within(provider.launch(spec))
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])
        stranger = await self.started(cluster="Prod.Größe", node="node-1-example-org")
        self.assertEqual(await self.within(stranger.list()), [])
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_the_identity_is_metadata_and_in_no_url(self) -> None:
        provider = await self.started()
        spec = self.spec()
        await self.within(provider.launch(spec))
        self.assertEqual(self.identity(self.world.bodies[0])["key_pem"], spec.identity.key_pem)
        for url in self.world.urls:
            self.assertNotIn(b"PRIVATE", url)
            self.assertNotIn(b"token=", url)

    async def test_one_pod_costs_few_calls(self) -> None:
        self.settings.update(watch_seconds=60.0, poll_seconds=0.5)
        provider = await self.started()
        begun = len(self.world.requests)
        launched = await self.within(provider.launch(self.spec()))
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        first, *others = self.actions(begun)
        self.assertEqual(first, "launch")
        self.assertLessEqual(set(others), {"operation", "get instances"})
        self.assertLessEqual(others.count("operation"), 2)
        begun = len(self.world.requests)
        for _ in range(2):
            await self.within(provider.destroy(launched.id))
        [ended] = self.world.requests[begun:]
        self.assertEqual((ended["Action"], ended["noGracefulShutdown"]), ("destroy", "true"))

    async def test_a_launch_ends_when_the_shared_list_shows_that_the_vm_runs(self) -> None:
        """There is no need to wait for the operation, which is polled less and less often."""
        self.settings.update(settle_seconds=300.0)
        self.patch(GcpCloud, "_thd_poll_launch", lambda self, driver, vm: vm)  # it never ends
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        await self.within(provider.destroy(launched.id))

    async def test_all_threads_share_a_token_and_none_lists_zones(self) -> None:
        provider = await self.started()
        calls = [self.within(provider.list()) for _ in range(12)]
        for call in calls:
            await call
        self.assertEqual(self.actions().count("token"), 1)
        self.assertLessEqual(
            set(self.actions()),
            {"token", "get images", "get subnetworks", "get machineTypes", "list instances"},
        )

    async def test_lists_of_several_pages_are_read_to_the_end(self) -> None:
        self.world.api.page = 2
        provider = await self.started()
        launched = [await self.within(provider.launch(self.spec())) for _ in range(5)]
        provider = await self.restarted(provider)
        listed = await self.within(provider.list())
        self.assertEqual({one.id for one in listed}, {one.id for one in launched})

    async def test_the_cheapest_type_that_fits(self) -> None:
        provider = await self.started()
        for size, name in (
            (Size(), "e2-micro"),
            (Size(cpu_millis=400), "e2-small"),  # of a shared CPU, only a share counts
            (Size(memory_bytes=3 << 30), "e2-medium"),
            (Size(cpu_millis=3000), "e2-standard-4"),
        ):
            instance = await self.within(provider.launch(self.spec(size=size)))
            self.assertEqual(instance.size, name)
        costs = [one.cost_per_hour for one in await self.within(provider.list())]
        self.assertTrue(all(cost and 0.005 < cost < 0.5 for cost in costs), costs)

    async def test_a_type_that_only_one_zone_has(self) -> None:
        self.settings["zones"] = [ZONES[1], ZONES[0]]
        provider = await self.started()
        instance = await self.within(provider.launch(self.spec(size=Size(cpu_millis=8000))))
        self.assertEqual(instance.size, "e2-standard-8")
        self.assertTrue(instance.id.startswith(f"{ZONES[0]}."), instance.id)
        self.assertEqual(len(self.world.bodies), 1)

    async def test_annotations_are_served(self) -> None:
        self.world.api.add_image("other")
        self.world.api.add_address("web")
        self.settings |= {
            "allowed_images": ["other"],
            "allowed_subnets": ["pods"],
            "allowed_security_groups": ["web", "int*"],
            "allowed_instance_profiles": ["*@test-project.iam.gserviceaccount.com"],
            "allowed_elastic_addresses": ["web"],
        }
        provider = await self.started()
        wanted = {
            "infranetes.aws.instancetype": "e2-standard-2",
            "infranetes.io/subnet": "pods",
            "infranetes.io/security-groups": "web,internal",
            "infranetes.io/spot": "true",
            "infranetes.io/image": "other",
            "infranetes.io/elastic-address": "web",
            "infranetes.io/instance-profile": "web@test-project.iam.gserviceaccount.com",
            "infranetes.sethostname": "false",
        }
        instance = await self.running(provider, self.spec(annotations=wanted))
        [body] = self.world.bodies
        [disk], [interface] = body["disks"], body["networkInterfaces"]
        self.assertEqual(body["machineType"], f"zones/{ZONES[0]}/machineTypes/e2-standard-2")
        self.assertEqual(interface["subnetwork"], "regions/europe-west1/subnetworks/pods")
        self.assertEqual(interface["accessConfigs"][0]["natIP"], "203.0.113.77")
        self.assertEqual(body["tags"], {"items": ["web", "internal"]})
        self.assertEqual(
            body["scheduling"],
            {
                "provisioningModel": "SPOT",
                "instanceTerminationAction": "STOP",
                "automaticRestart": False,
                "onHostMaintenance": "TERMINATE",
            },
        )
        self.assertEqual(disk["initializeParams"]["sourceImage"], "projects/test-project/global/images/other")
        self.assertEqual(body["serviceAccounts"][0]["email"], "web@test-project.iam.gserviceaccount.com")
        self.assertEqual(self.identity(body)["hostname"], "")
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), ["address web"])
        self.world.api.addresses.clear()

    async def test_pods_ask_for_no_tags_but_those_that_are_allowed(self) -> None:
        """Firewall rules apply to tags, so tags decide how all pods are protected, whatever they request."""
        name = "infranetes.io/security-groups"
        self.settings |= {"tags": ["pods"], "allowed_security_groups": ["web", "internal"]}
        provider = await self.started()
        for tags in ("pods", "web,open"):
            spec = self.spec(annotations={name: tags})
            error = await self.refused(InvalidArgument, provider.launch(spec))
            self.assertIn("providers.gcp.allowed_security_groups", str(error))
        self.assertEqual(self.world.bodies, [])
        for asked, made in (({name: "web,internal"}, ["web", "internal"]), ({}, ["pods"])):
            await self.within(provider.launch(self.spec(annotations=asked)))
            self.assertEqual(self.world.bodies[-1]["tags"], {"items": made})

    async def test_a_disk_is_never_smaller_than_its_image(self) -> None:
        for wanted, made in ((0, "10"), (5, "10"), (20, "20")):
            self.settings["disk_gib"] = wanted
            provider = await self.started()
            instance = await self.within(provider.launch(self.spec()))
            zone, _, name = instance.id.partition(".")
            self.assertEqual(self.world.api.disks[zone, name]["sizeGb"], made)

    async def test_a_disk_is_encrypted_with_the_configured_key(self) -> None:
        key = "projects/key-project/locations/europe-west1/keyRings/pods/cryptoKeys/disks"
        for wanted, made in (("", None), (key, {"kmsKeyName": key})):
            self.settings["disk_key"] = wanted
            provider = await self.started()
            await self.within(provider.launch(self.spec()))
            [disk] = self.world.bodies[-1]["disks"]
            self.assertEqual(disk.get("diskEncryptionKey"), made)

    async def test_what_vms_are_shielded_by(self) -> None:
        self.world.api.add_image("by-uefi", guestOsFeatures=[{"type": "UEFI_COMPATIBLE"}])
        self.settings["image"] = "by-uefi"
        for wanted, made in (
            ({}, None),
            ({"secure_boot": True}, (True, True, True)),
            ({"vtpm": False, "integrity_monitoring": False}, (False, False, False)),
            ({"integrity_monitoring": False}, (False, True, False)),
        ):
            before = dict(self.settings)
            self.settings.update(wanted)
            provider = await self.started()
            await self.within(provider.launch(self.spec()))
            names = ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring")
            shielded = dict(zip(names, made, strict=True)) if made else None
            self.assertEqual(self.world.bodies[-1].get("shieldedInstanceConfig"), shielded)
            self.settings = before

    async def test_an_image_that_could_not_boot_securely_is_reported_at_the_start(self) -> None:
        self.settings["secure_boot"] = True
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        self.assertIn("UEFI_COMPATIBLE", str(error))
        self.settings["secure_boot"] = False

    async def test_gpus_come_with_the_machine_type(self) -> None:
        self.settings["sizes"] = ["e2-*", "g2-*"]
        self.settings["allowed_images"] = ["with-drivers"]
        self.world.api.add_image("with-drivers")
        provider = await self.started()
        wanted = {"infranetes.io/gpus": "1", "infranetes.io/image": "with-drivers"}
        instance = await self.within(provider.launch(self.spec(annotations=wanted)))
        self.assertEqual(instance.size, "g2-standard-4")
        self.assertEqual(self.world.bodies[0]["scheduling"]["onHostMaintenance"], "TERMINATE")

    async def test_confidential_vms_have_a_type_that_can_be_one_and_stay_on_their_host(self) -> None:
        self.settings |= {"sizes": ["e2-*", "n2d-*", "c3-*"], "image": "confidential"}
        features = [{"type": name} for name in ("UEFI_COMPATIBLE", "SEV_SNP_CAPABLE", "TDX_CAPABLE")]
        self.world.api.add_image("confidential", guestOsFeatures=features)
        provider = await self.started()
        for value, size, kind, platform in (
            ("sev-snp", "n2d-standard-2", "SEV_SNP", "AMD Milan"),
            ("tdx", "c3-standard-4", "TDX", None),
        ):
            spec = self.spec(annotations={"infranetes.io/confidential": value})
            instance = await self.within(provider.launch(spec))
            body = self.world.bodies[-1]
            self.assertEqual((instance.size, body.get("minCpuPlatform")), (size, platform))
            options = {"enableConfidentialCompute": True, "confidentialInstanceType": kind}
            self.assertEqual(body["confidentialInstanceConfig"], options)
            self.assertEqual(body["scheduling"]["onHostMaintenance"], "TERMINATE")
        await self.within(provider.launch(self.spec()))
        self.assertNotIn("confidentialInstanceConfig", self.world.bodies[-1])

    async def test_a_confidential_vm_of_an_image_that_can_be_none_is_refused(self) -> None:
        self.settings["sizes"] = ["n2d-*"]
        provider = await self.started()
        spec = self.spec(annotations={"infranetes.io/confidential": "sev-snp"})
        error = await self.refused(InvalidArgument, provider.launch(spec))
        self.assertIn("confidentialInstanceConfig", str(error))
        self.assertEqual(self.world.holdings(), [])

    @needs_mounts
    async def test_gpus_that_the_image_has_no_driver_for_are_not_paid(self) -> None:
        self.settings["sizes"] = ["e2-*", "g2-*"]
        provider = await self.started()
        for name, value in (("gpus", "1"), ("instance-type", "g2-standard-4")):
            asked = self.spec(annotations={f"infranetes.io/{name}": value})
            error = await self.refused(InvalidArgument, provider.launch(asked))
            self.assertIn("no driver", str(error))
        self.assertEqual(self.world.bodies, [])
        image = await self.world.machine_image("web:1.0")
        whole = self.spec(annotations={"infranetes.io/gpus": "1"}, image=image)
        self.assertEqual((await self.within(provider.launch(whole))).size, "g2-standard-4")

    async def test_a_public_address_is_released_with_the_vm(self) -> None:
        self.settings |= {"allow_public_address": True, "allowed_elastic_addresses": ["new"]}
        provider = await self.started()
        for name, value in (("public-address", "true"), ("elastic-address", "new")):
            instance = await self.running(provider, self.spec(annotations={f"infranetes.io/{name}": value}))
            access = self.world.bodies[-1]["networkInterfaces"][0]["accessConfigs"]
            self.assertEqual(access, [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}])
            await self.within(provider.destroy(instance.id))
            self.assertEqual(self.world.holdings(), [])

    async def test_unsupported_annotations_are_named(self) -> None:
        self.settings["allowed_elastic_addresses"] = ["*"]
        provider = await self.started()
        for name, value in (
            ("infranetes.io/region", "us-central1"),
            ("infranetes.io/image", "ami-1/../../x"),
            ("infranetes.io/subnet", "Subnet_1"),
            ("infranetes.io/security-groups", "SG_1"),
            ("infranetes.io/elastic-address", "nowhere"),
            ("infranetes.io/instance-profile", "web"),
            ("infranetes.io/spot-max-price", "0.05"),
            ("infranetes.io/instance-type", "n2-standard-2"),  # not among the allowed sizes
        ):
            error = await self.refused(InvalidArgument, provider.launch(self.spec(annotations={name: value})))
            self.assertIn(name, str(error))
        self.assertEqual(self.world.bodies, [])

    async def test_missing_resources_are_reported_at_the_start(self) -> None:
        for key, value in (("image", "nothing"), ("subnetwork", "nowhere")):
            good = self.settings[key]
            self.settings[key] = value
            provider = self.make_provider()
            error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
            self.assertIn(value, str(error))
            self.settings[key] = good


class EndTests(GcpCase, TestCase):
    """How VMs end, and what could outlive them."""

    async def test_a_preempted_spot_vm_says_so(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec(annotations={"infranetes.io/spot": "true"}))
        self.world.preempt(instance.id)
        await self.until(lambda: ended, "the preemption is told")
        self.assertIs(ended[0].state, InstanceState.ENDED)
        self.assertIn("preempted", ended[0].detail)
        error = await self.refused(Unavailable, provider.wait_running(instance.id, 1.0))
        self.assertIn("preempted", str(error))
        self.assertIn("Welcome to the guest", str(error))
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_stopped_vm_is_not_called_preempted(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec(annotations={"infranetes.io/spot": "true"}))
        self.world.end(instance.id)
        [listed] = await self.within(provider.list())
        self.assertEqual((listed.state, listed.detail), (InstanceState.ENDED, "its status is TERMINATED"))

    async def test_vms_of_an_unreachable_zone_have_not_ended(self) -> None:
        self.settings.update(retry_first=0.5, retry_most=0.5)
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        self.world.api.unreachable = ZONES[0]
        begun = len(self.world.requests)
        await self.until(lambda: len(self.world.requests) > begun + 3, "it is asked again")
        self.assertEqual(ended, [])
        self.world.api.unreachable = ""
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])

    async def test_a_zone_that_is_not_configured_and_unreachable_is_nobodys_concern(self) -> None:
        self.settings.update(zones=[ZONES[1]], sweep_seconds=0.2)
        self.world.api.unreachable = ZONES[0]
        labels = {
            "infranetes-cluster": self.cluster,
            "infranetes-node": self.node,
            "infranetes-token": "f" * 32,
        }
        self.world.api.add_disk(ZONES[1], "mine", labels)
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])
        await self.until(lambda: "disk europe-west1-c.mine" not in self.world.holdings(), "it is swept")
        await self.within(provider.destroy(instance.id))
        asked = {one["path"].split("/")[2] for one in self.world.requests if "/zones/" in one.get("path", "")}
        self.assertEqual(asked, {ZONES[1]})

    async def test_unused_disks_of_ours_are_swept_and_no_others(self) -> None:
        self.settings["sweep_seconds"] = 0.2
        mine = {
            "infranetes-cluster": self.cluster,
            "infranetes-node": self.node,
            "infranetes-token": "f" * 32,
        }
        self.world.api.add_disk(ZONES[1], "mine", mine)
        self.world.api.add_disk(ZONES[1], "others", {**mine, "infranetes-node": "other"})
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.until(lambda: (ZONES[1], "mine") not in self.world.api.disks, "ours is released")
        kept = {f"disk {ZONES[1]}.others", f"disk {instance.id}", f"instance {instance.id}"}
        self.assertEqual(set(self.world.holdings()), kept)
        self.world.api.disks.pop((ZONES[1], "others"))

    async def test_a_full_quota_that_the_operation_reports(self) -> None:
        provider = await self.started()
        self.world.refusal = ("QUOTA_EXCEEDED", "Quota 'CPUS_ALL_REGIONS' exceeded.")
        self.world.faults.add(FaultKind.CAPACITY, self.launch_action)
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn("CPUS_ALL_REGIONS", str(error))
        self.assertEqual(len(self.world.bodies), 1)
        self.assertEqual(self.world.holdings(), [])

    async def test_a_familys_full_quota_that_the_operation_reports(self) -> None:
        self.settings["sizes"] = ["e2-*", "n2-*"]
        provider = await self.started()
        self.world.refusal = ("QUOTA_EXCEEDED", "Quota 'CPUS' exceeded.  Limit: 8.0 in region europe-west1.")
        self.world.faults.add(
            FaultKind.CAPACITY, self.launch_action, only=lambda asked: asked["size"].startswith("e2-")
        )
        launched = await self.within(provider.launch(self.spec()))
        self.assertEqual((launched.size, len(self.world.bodies)), ("n2-standard-2", 2))
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_key_that_google_may_not_use(self) -> None:
        key = "projects/key-project/locations/europe-west1/keyRings/pods/cryptoKeys/disks"
        self.settings["disk_key"] = key
        provider = await self.started()
        denied = (
            "Permission 'cloudkms.cryptoKeyVersions.useToEncrypt' denied on resource (or it may not exist)."
        )
        self.world.refusal = ("ANY_CODE", f"Cloud KMS error when using key {key}: {denied}")
        self.world.faults.add(FaultKind.CAPACITY, self.launch_action)
        error = await self.refused(InvalidArgument, provider.launch(self.spec()))
        self.assertIn(key, str(error))
        self.assertEqual((len(self.world.bodies), self.world.holdings()), (1, []))


class CredentialTests(GcpCase, TestCase):
    """The credentials of calls."""

    async def test_the_nodes_own_account_by_the_metadata_server(self) -> None:
        self.settings["key_file"] = ""
        environment = {"GOOGLE_APPLICATION_CREDENTIALS": "", "CLOUDSDK_CONFIG": str(self.run_dir)}
        patched = mock.patch.dict(os.environ, environment)
        patched.start()
        self.addCleanup(patched.stop)
        provider = await self.started()
        self.assertEqual(await self.within(provider.list()), [])

    async def test_a_token_that_is_refused_is_replaced(self) -> None:
        provider = await self.started()
        self.world.revoke_tokens()
        self.assertEqual(await self.within(provider.list()), [])
        tokens = [one for one in self.world.requests if one["Action"] == "token"]
        self.assertEqual(len(tokens), 2)

    async def test_another_issuers_identity_by_a_service_account(self) -> None:
        token = Path(self.settings["key_file"]).with_name("token")
        token.write_text("header.payload.signature")
        identity = self.world.identity
        identity.subjects[token.read_text()] = "node-1"
        google_identity.write(self.world.key_file, identity.external({"file": str(token)}, ACCOUNT))
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("iam.serviceAccounts.getAccessToken", str(error))
        identity.impersonators.add((f"{POOL}node-1", ACCOUNT))
        provider = await self.started()
        await self.within(provider.launch(self.spec()))
        tokens = [one for one in self.world.requests if one["Action"] == "token"]
        self.assertEqual(len(tokens), 1)

    async def test_no_token_for_a_while_is_waited_for(self) -> None:
        provider = await self.started()
        self.world.revoke_tokens()
        asked = len(self.world.identity.asked)
        with self.world.identity.refusing(503):
            listed = provider.list()
            await self.until(lambda: len(self.world.identity.asked) > asked + 1, "a token is asked for again")
        self.assertEqual(await self.within(listed), [])

    async def test_a_key_that_others_may_read_is_refused(self) -> None:
        self.world.key_file.chmod(0o644)
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("chmod 600", str(error))
        self.assertEqual(self.world.requests, [])
        self.world.key_file.chmod(0o600)

    async def test_an_invalid_key_is_refused_without_showing_it(self) -> None:
        good = self.world.key_file.read_text()
        for content, words in (
            ("hush", "no JSON"),
            ('{"type": "service_account", "private_key": "hush"}', "private_key is no key"),
            ("[]", "no JSON"),
        ):
            self.world.key_file.write_text(content)
            error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
            self.assertIn(f"key_file {self.world.key_file}", str(error))
            self.assertIn(words, str(error))
            self.assertNotIn("hush", str(error))
        self.world.key_file.write_text(good.replace("node@", "somebody@"))
        await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.world.key_file.write_text(good)


class ImageTests(GcpCase, TestCase):
    """Finding machine images."""

    async def found(self, work: Any) -> Any:
        """Return the result of calling `work` with a cloud and a driver."""
        settings = config.structure(self.settings, Settings, source="test")
        book = OfferBook(self.state_dir / "offers.json", GcpOffers(settings), {})
        cloud = GcpCloud(settings, self.context(), book)
        return await run_in_thread(reactor, lambda: work(cloud, cloud._thd_connect(5.0)))

    def add(self, name: str, version: str, **fields: Any) -> None:
        labels = {"infranetes": "true", "infranetes-image-name": "web"}
        labels["infranetes-image-version"] = version
        self.world.api.add_image(name, labels=labels, **fields)

    async def test_the_newest_usable_image_is_found(self) -> None:
        self.add("web-old", "1_2e0", creationTimestamp="2024-01-01T00:00:00.000-08:00")
        self.add("web-new", "1_2e0", creationTimestamp="2025-01-01T00:00:00.000-08:00")
        self.add("web-arm", "1_2e0", architecture="ARM64")
        self.add("web-broken", "1_2e0", status="FAILED")
        self.add("web-obsolete", "1_2e0", deprecated={"state": "OBSOLETE"})
        self.add("web-next", "1_2e1")
        found = await self.found(lambda cloud, driver: cloud._thd_find_image(driver, "web", "1.0"))
        id = "projects/test-project/global/images/web-new"
        self.assertEqual(found, MachineImage(id, "web", "1.0", 700 << 20))
        self.assertTrue(await self.found(lambda cloud, driver: cloud._thd_has_image(driver, id)))
        del self.world.api.images["web-new"]
        for gone in (id, "x/../y"):
            there = await self.found(lambda cloud, driver, gone=gone: cloud._thd_has_image(driver, gone))
            self.assertFalse(there)

    async def test_a_missing_image_error_says_what_was_looked_for(self) -> None:
        def look(cloud: Any, driver: Any) -> Any:
            try:
                return cloud._thd_find_image(driver, "a/b", "1.0")
            except CloudError as error:
                return error

        error = await self.found(look)
        self.assertIs(error.kind, ErrorKind.NOT_FOUND)
        self.assertIn("infranetes-image-name=a_2fb", str(error))
