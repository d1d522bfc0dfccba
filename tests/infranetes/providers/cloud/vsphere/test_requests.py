# SPDX-License-Identifier: Apache-2.0
"""The vSphere provider's requests: tags, secrets, TLS, templates, annotations, few calls."""

from __future__ import annotations

import json
from typing import Any

from pyVmomi import vim
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.interface import InstanceState, Size
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound
from tests.harness.durations import slow
from tests.infranetes.providers.cloud.vsphere.case import SETTINGS, VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NEVER, NO_AGENT
from tests.support.clouds.soap import LIST
from tests.support.clouds.vsphere import identity_of

LOOK = "RetrievePropertiesEx"


class LaunchTests(VsphereCase, TestCase):
    """The requests of one launch."""

    async def test_a_vm_is_created_complete_with_one_request(self) -> None:
        self.world.behaviour = NEVER
        provider = await self.started()
        spec = self.spec(size=Size(cpu_millis=1500, memory_bytes=700 << 20))
        instance = await self.within(provider.launch(spec))
        [vm] = self.world.vms()
        expected = {
            "infranetes-cluster": self.cluster,
            "infranetes-node": self.node,
            "infranetes-sandbox": spec.sandbox_id,
            "infranetes-token": spec.token,
            "infranetes-name": vm.name,
        }
        tags = vcsim.extra_config(vm)
        self.assertEqual({**tags, **expected}, tags)
        self.assertEqual(json.loads(identity_of(vm))["key_pem"], spec.identity.key_pem)
        self.assertEqual((vm.config.hardware.numCPU, vm.config.hardware.memoryMB), (2, 1024))
        self.assertEqual(instance.size, "2cpu-1024mib")
        self.assertIn(spec.sandbox_id, vm.config.annotation)
        self.assertEqual([network.name for network in vm.network], ["DC0_DVPG0"])
        self.assertEqual(len(self.world.asked("CloneVM_Task")), 1)
        self.assertEqual(self.world.asked("ReconfigVM_Task"), [])

    async def test_clones_share_the_disks_of_a_template_with_a_snapshot(self) -> None:
        self.world.behaviour = NEVER
        for image, linked in ((vcsim.TEMPLATE, True), (vcsim.BARE, False)):
            self.settings["image"] = image
            provider = await self.started()
            await self.within(provider.launch(self.spec()))
            body = self.world.asked("CloneVM_Task")[-1]["body"]
            self.assertEqual("createNewChildDiskBacking" in body, linked)
            self.assertEqual("<snapshot" in body, linked)
            await self.within(provider.stop())

    async def test_the_agent_erases_the_identity(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.agent_info(instance)
        await self.until(lambda: self.world.is_erased(instance.id), "guestinfo has no key any more")

    async def test_lists_do_not_read_identities(self) -> None:
        """Tags are read once per VM, everything else with each list."""
        provider = await self.started()
        await self.running(provider, self.spec())
        before = len([one for one in self.world.requests if "extraConfig" in one["body"]])
        lists = len(self.world.asked(LIST))
        for _ in range(3):
            await self.within(provider.list())
        self.assertGreaterEqual(len(self.world.asked(LIST)), lists + 3)
        self.assertEqual(len([one for one in self.world.requests if "extraConfig" in one["body"]]), before)

    async def test_one_list_is_one_call(self) -> None:
        self.settings["watch_seconds"] = 60.0
        self.settings["threads"] = 1
        provider = await self.started()
        for _ in range(3):
            await self.running(provider, self.spec())
        await self.within(provider.list())
        begun = len(self.world.requests)
        listed = await self.within(provider.list())
        self.assertEqual(len(listed), 3)
        self.assertEqual([one["Action"] for one in self.world.requests[begun:]], [LIST])

    async def test_only_configured_networks_are_served(self) -> None:
        self.world.behaviour = NEVER
        provider = await self.started()
        await self.within(provider.launch(self.spec(annotations={"infranetes.io/subnet": "DC0_DVPG1"})))
        [vm] = self.world.vms()
        self.assertEqual([network.name for network in vm.network], ["DC0_DVPG1"])
        error = await self.refused(
            InvalidArgument, provider.launch(self.spec(annotations={"infranetes.io/subnet": "Management"}))
        )
        self.assertIn("infranetes.io/subnet", str(error))

    async def test_a_port_group_of_a_host_of_its_own(self) -> None:
        self.world.behaviour = NEVER
        self.settings["networks"] = ["VM Network"]
        provider = await self.started()
        await self.within(provider.launch(self.spec()))
        [vm] = self.world.vms()
        self.assertEqual([network.name for network in vm.network], ["VM Network"])

    async def test_unsupported_annotations_are_named(self) -> None:
        provider = await self.started()
        for name, value in (
            ("infranetes.io/region", "us-east-1"),
            ("infranetes.io/gpus", "1"),
            ("infranetes.io/spot", "true"),
            ("infranetes.io/spot-max-price", "0.1"),
            ("infranetes.io/elastic-address", "new"),
            ("infranetes.io/public-address", "true"),
            ("infranetes.io/security-groups", "sg-1"),
            ("infranetes.io/instance-profile", "web"),
            ("infranetes.io/instance-type", "m5.large"),
        ):
            error = await self.refused(InvalidArgument, provider.launch(self.spec(annotations={name: value})))
            self.assertIn(name, str(error))
        self.assertEqual(self.world.asked("CloneVM_Task"), [])

    async def test_addresses_outside_the_pods_network_are_ignored(self) -> None:
        """VMware Tools in a pod may report any address."""
        self.settings["addresses"] = "10.9.0.0/16"
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        vm = self.world.vm(launched.id)
        await self.until(lambda: vm.guest.ipAddress, "it has told one")
        self.assertEqual((await self.within(provider.get(launched.id))).address, "")
        self.world.vcsim.reconfigure(vm, {"SET.guest.ipAddress": "10.9.1.2"})
        instance = await self.within(provider.wait_running(launched.id, self.boot_timeout))
        self.assertEqual(instance.address, "10.9.1.2")

    async def test_vms_of_others_in_the_folder_are_left_alone(self) -> None:
        bare = self.world.vcsim.find(f"vm/{vcsim.BARE}")
        pool = self.world.vcsim.find(f"host/{vcsim.POOLS[0]}")
        where = vim.vm.RelocateSpec(pool=pool)
        vcsim.done(bare.CloneVM_Task(self.world.inventory, "theirs", vim.vm.CloneSpec(location=where)))
        provider = await self.started()
        self.assertEqual(await self.within(provider.list()), [])
        await self.within(provider.destroy("theirs"))
        self.assertEqual(self.world.names(), ["theirs"])
        vcsim.done(self.world.vm("theirs").Destroy_Task())


class CostTests(VsphereCase, TestCase):
    """How many requests a pod costs, counting each SOAP request except the lists, which all pods share."""

    async def started_for_requests(self, **settings: float) -> Any:
        self.world.behaviour = NO_AGENT
        self.settings.update(watch_seconds=60.0, threads=1)
        self.settings.update(settings)
        return await self.started()

    def own(self, begun: int) -> list[str]:
        return [one["Action"] for one in self.world.requests[begun:] if one["Action"] != LIST]

    async def test_a_start_logs_in_once_and_asks_for_the_managers_once(self) -> None:
        await self.started_for_requests()
        asked = [one["Action"] for one in self.world.requests]
        self.assertEqual((asked.count("Login"), asked.count("RetrieveServiceContent")), (1, 1), asked)

    async def test_the_life_of_a_later_pod_is_five_requests(self) -> None:
        provider = await self.started_for_requests()
        self.world.clone_seconds = 1.0
        await self.within(provider.destroy((await self.running(provider, self.spec())).id))
        begun = len(self.world.requests)
        instance = await self.running(provider, self.spec())
        self.assertEqual(self.own(begun), ["CloneVM_Task", LOOK])
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.own(begun)[2:], ["PowerOffVM_Task", LOOK, "Destroy_Task"])

    async def test_a_clone_that_has_ended_soon_is_looked_at_besides(self) -> None:
        """It may be powered off, since what vCenter reports of a failed power-on is not documented."""
        provider = await self.started_for_requests()
        await self.within(provider.destroy((await self.running(provider, self.spec())).id))
        begun = len(self.world.requests)
        await self.running(provider, self.spec())
        self.assertLessEqual(len(self.own(begun)), 4)

    async def test_the_end_of_a_pod_is_three_requests_and_a_list_confirms_it(self) -> None:
        provider = await self.started_for_requests()
        instance = await self.running(provider, self.spec())
        begun = len(self.world.requests)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.own(begun), ["PowerOffVM_Task", LOOK, "Destroy_Task"])
        self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(provider._ledger.ending, set())
        self.assertEqual(self.world.holdings(), [])

    async def test_the_end_of_one_that_is_off_is_two(self) -> None:
        provider = await self.started_for_requests(watch_seconds=0.3)
        instance = await self.running(provider, self.spec())
        ended: list[object] = []
        provider.watch(ended.append)
        self.world.end(instance.id)
        await self.until(lambda: ended, "its end is seen")
        begun = len(self.world.requests)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.own(begun), [LOOK, "Destroy_Task"])

    @slow(10, "polls are so far apart that five clones share them")
    async def test_no_thread_waits_for_clones_and_their_tasks_are_looked_at_together(self) -> None:
        """A node with one thread begins them all, lists VMs meanwhile, and polls in one request."""
        provider = await self.started_for_requests(poll_seconds=1.5)
        self.world.slow_clones.on = True
        begun = len(self.world.requests)
        launched = await gatherResults([self.within(provider.launch(self.spec())) for _ in range(5)])
        self.assertEqual(self.world.names(), [])
        self.assertEqual({vm.state for vm in launched}, {InstanceState.PENDING})
        self.assertEqual(len(self.world.asked("CloneVM_Task")), 5)
        self.assertLess(self.own(begun).count(LOOK), 5)
        before = len(self.world.requests)
        self.assertEqual(len(await self.within(provider.list())), 5)
        self.assertEqual([one["Action"] for one in self.world.requests[before:]], [LIST])
        await self.world.release_clones()
        for vm in launched:
            await self.within(provider.wait_running(vm.id, self.boot_timeout))
        self.assertEqual((self.world.asked("PowerOnVM_Task"), self.world.asked("QueryEvents")), ([], []))

    async def test_no_thread_waits_while_vms_are_powered_off(self) -> None:
        provider = await self.started_for_requests()
        instances = [await self.running(provider, self.spec()) for _ in range(3)]
        begun = len(self.world.requests)
        await gatherResults([self.within(provider.destroy(one.id)) for one in instances])
        asked = self.own(begun)
        self.assertEqual(asked[:3], ["PowerOffVM_Task"] * 3)
        self.assertEqual(len(asked), 9)


class ConfigurationTests(VsphereCase, TestCase):
    """Errors at the start."""

    async def refused_start(self, **changes: Any) -> str:
        self.settings.update(changes)
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        await self.within(provider.stop())
        self.settings = self.world.table()
        return str(error)

    async def test_each_missing_name_is_reported(self) -> None:
        for key, value in (
            ("datacenter", "nowhere"),
            ("folder", "nowhere"),
            ("image", "nowhere"),
            ("image_folder", "nowhere"),
            ("datastore", "nowhere"),
            ("networks", ["nowhere"]),
            ("resource_pools", ["DC0_C0"]),
        ):
            self.assertIn("folder" if key == "datacenter" else key, await self.refused_start(**{key: value}))

    async def test_a_vm_that_is_no_template(self) -> None:
        template = self.world.vcsim.find(f"vm/{vcsim.BARE}")
        pool = self.world.vcsim.find(f"host/{vcsim.POOLS[0]}")
        template.MarkAsVirtualMachine(pool, None)
        self.addCleanup(template.MarkAsTemplate)
        self.assertIn("markastemplate", await self.refused_start(image=vcsim.BARE))

    async def test_an_untrusted_server_gets_no_password(self) -> None:
        self.settings.pop("ca_file")
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        self.assertIn("ca_file", str(error))
        self.assertEqual(self.world.requests, [])
        self.settings.update(self.world.table())

    async def test_a_password_that_others_may_read(self) -> None:
        self.world.password.chmod(0o644)
        self.assertIn("chmod", await self.refused_start())
        self.assertEqual(self.world.asked("Login"), [])
        self.world.password.chmod(0o600)

    async def test_messages_have_no_password(self) -> None:
        provider = await self.started()
        said = repr(provider.status()) + repr(vars(provider))
        self.assertNotIn(vcsim.PASSWORD, said)


class SettingsTests(SynchronousTestCase):
    def test_invalid_values_are_named(self) -> None:
        structure(SETTINGS, Settings, source="test")
        for key, value in (
            ("host", "https://vcenter"),
            ("host", "vcenter/sdk"),
            ("username", ""),
            ("datacenter", ""),
            ("folder", "/pods"),
            ("image", "a//b"),
            ("resource_pools", []),
            ("networks", [""]),
            ("addresses", "10.0.0.0/33"),
        ):
            error = self.assertRaises(
                ConfigError, structure, {**SETTINGS, key: value}, Settings, source="test"
            )
            self.assertIn(key, str(error))


class CatalogueTests(VsphereCase, TestCase):
    """Templates as images of VM-image pods."""

    def put(self, name: str, extra: dict[str, str] | None = None, template: bool = True) -> Any:
        """Add a VM to the folder of images."""
        source = self.world.vcsim.find(f"vm/{vcsim.BARE}")
        where = vim.vm.RelocateSpec(pool=self.world.vcsim.find(f"host/{vcsim.POOLS[0]}"))
        vcsim.done(source.CloneVM_Task(self.world.images, name, vim.vm.CloneSpec(location=where)))
        made = self.world.vcsim.find(f"vm/{self.world.folder}/images/{name}")
        if extra:
            self.world.vcsim.reconfigure(made, extra)
        if template:
            made.MarkAsTemplate()
        return made

    async def test_a_template_is_found_by_its_name_or_tag_and_launched(self) -> None:
        named = self.put("web-1.0")
        tagged = self.put("whatever", {"infranetes.image_name": "team/web:2.0"})
        self.put("web-3.0", template=False)
        provider: Any = await self.started()
        catalogue = provider.catalogue
        first = await self.within(catalogue.find("vsphere.infranetes.io/web:1.0", {}))
        second = await self.within(catalogue.find("team/web:2.0", {}))
        self.assertEqual(first.machine, named.config.instanceUuid)
        self.assertEqual(second.machine, tagged.config.instanceUuid)
        for lacking in ("web:3.0", "web:4.0"):
            self.assertIn(lacking, str(await self.refused(NotFound, catalogue.find(lacking, {}))))
        self.assertTrue(await self.within(catalogue.present(second)))
        instance = await self.running(provider, self.spec(image=second.machine))
        self.assertEqual(self.world.asked("CloneVM_Task")[-1]["this"], tagged._moId)
        await self.within(provider.destroy(instance.id))
        vcsim.done(tagged.Destroy_Task())
        self.assertFalse(await self.within(catalogue.present(second)))

    async def test_an_annotations_image_is_in_the_image_folder(self) -> None:
        self.put("web-1.0")
        self.settings["allowed_images"] = ["*"]
        provider = await self.started()
        await self.running(provider, self.spec(annotations={"infranetes.io/image": "web-1.0"}))
        for name in (vcsim.BARE, "nowhere"):
            error = await self.refused(
                InvalidArgument, provider.launch(self.spec(annotations={"infranetes.io/image": name}))
            )
            self.assertIn(name, str(error))
