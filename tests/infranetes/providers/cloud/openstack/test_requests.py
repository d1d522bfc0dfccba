# SPDX-License-Identifier: Apache-2.0
"""The OpenStack provider's requests: tags, secrets, addresses, annotations, tokens, refused launches."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.openstack.cloud import OpenStackCloud
from infranetes.providers.interface import InstanceState, Size
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from tests.infranetes.providers.cloud.case import OpenStackCase
from tests.support.clouds import nova_resources, openstack
from tests.support.clouds.faults import NO_AGENT, FaultKind
from tests.support.clouds.nova_resources import ZONES

NEW = {"infranetes.io/elastic-address": "new"}


class RequestCase(OpenStackCase):
    """Servers without agents."""

    async def started_for_requests(self, **settings: Any) -> Any:
        self.world.behaviour = NO_AGENT
        self.settings["allowed_elastic_addresses"] = ["*"]
        self.settings.update(settings)
        return await self.started()

    def actions(self, begun: int = 0) -> list[str]:
        return [one["Action"] for one in self.world.requests[begun:]]

    async def refusal(self, provider: Any, **annotations: str) -> str:
        asked = {f"infranetes.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
        return str(await self.refused(InvalidArgument, provider.launch(self.spec(annotations=asked))))


class LaunchTests(RequestCase, TestCase):
    """The requests of one launch."""

    async def test_whose_a_server_is_is_said_when_it_is_created(self) -> None:
        provider = await self.started_for_requests()
        spec = self.spec()
        await self.within(provider.launch(spec))
        server = self.world.bodies[0]["server"]
        self.assertEqual(
            server["metadata"],
            {
                "infranetes-cluster": self.cluster,
                "infranetes-node": self.node,
                "infranetes-sandbox": spec.sandbox_id,
                "infranetes-token": spec.token,
                "infranetes-zone": ZONES[0],
            },
        )
        tags = [f"infranetes-cluster={self.cluster}", f"infranetes-node={self.node}"]
        self.assertEqual(server["tags"], [*tags, f"infranetes-token={spec.token}"])
        self.assertEqual(server["name"], f"infranetes-{spec.token}-0")
        self.assertEqual(server["security_groups"], [{"name": "infranetes"}])
        self.assertEqual(server["networks"], [{"uuid": self.world.api.network}])
        self.assertEqual(json.loads(base64.b64decode(server["user_data"]))["key_pem"], spec.identity.key_pem)
        for url in self.world.urls:
            self.assertNotIn(b"PRIVATE", url)

    async def test_names_that_are_no_valid_tags(self) -> None:
        cluster, node = "Prod/Größe," + "x" * 60, "node-1.example.org"
        provider = await self.started(cluster=cluster, node=node)
        instance = await self.within(provider.launch(self.spec(cluster=cluster, node=node)))
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])
        stranger = await self.started(cluster=f"{cluster}x", node=node)
        self.assertEqual(await self.within(stranger.list()), [])
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_one_pod_costs_few_calls(self) -> None:
        provider = await self.started_for_requests(watch_seconds=60.0, poll_seconds=0.5)
        begun, began = len(self.world.requests), time.monotonic()
        launched = await self.within(provider.launch(self.spec()))
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        looks = self.actions(begun)
        self.assertEqual(self.of_the_pod(begun), ["find servers", "get images", "launch"])
        self.assertLessEqual(len(looks), 5 + (time.monotonic() - began) // 0.5)  # a machine may be slow
        begun = len(self.world.requests)
        for _ in range(2):
            await self.within(provider.destroy(launched.id))
        self.assertEqual(self.of_the_pod(begun), ["destroy"])

    def of_the_pod(self, begun: int) -> list[str]:
        """Return the actions since then, without lists, which cover all pods and are made independently."""
        return [each for each in self.actions(begun) if each != "list servers"]

    async def test_lists_of_several_pages_are_read_to_the_end(self) -> None:
        self.world.api.page = 2
        provider = await self.started_for_requests()
        launched = [await self.within(provider.launch(self.spec())) for _ in range(5)]
        provider = await self.restarted(provider)
        listed = await self.within(provider.list())
        self.assertEqual({one.id for one in listed}, {one.id for one in launched})

    async def test_the_smallest_flavor_that_fits_and_has_a_disk(self) -> None:
        provider = await self.started_for_requests()
        begun = len(self.world.requests)
        for size, name in (
            (Size(), "m1.tiny"),
            (Size(cpu_millis=1500), "m1.medium"),
            (Size(memory_bytes=1 << 30), "m1.small"),
        ):
            self.assertEqual((await self.within(provider.launch(self.spec(size=size)))).size, name)
        self.assertEqual({one.cost_per_hour for one in await self.within(provider.list())}, {None})
        self.assertEqual(self.actions(begun).count("get images"), 1, "the image is looked up once a minute")

    async def test_prices_of_ones_own_choose_and_are_shown(self) -> None:
        prices = self.run_dir / "prices.toml"
        prices.write_text('"m1.tiny" = 0.5\n"m1.small" = 0.02\n')
        provider = await self.started_for_requests(prices_file=str(prices))
        instance = await self.within(provider.launch(self.spec()))
        self.assertEqual((instance.size, instance.cost_per_hour), ("m1.small", 0.02))

    async def test_a_root_disk_of_a_size_of_its_own_is_a_volume_that_goes_with_the_server(self) -> None:
        self.world.api.flavors = [one for one in self.world.api.flavors if one["name"] == "m1.diskless"]
        group = nova_resources.new_id()
        provider = await self.started_for_requests(disk_gib=40, disk_type="fast", server_group=group)
        await self.within(provider.launch(self.spec()))
        [body] = self.world.bodies
        [volume] = body["server"]["block_device_mapping_v2"]
        self.assertEqual((volume["volume_size"], volume["volume_type"]), (40, "fast"))
        self.assertIs(volume["delete_on_termination"], True)
        self.assertIn(volume["uuid"], self.world.api.images)
        self.assertNotIn("imageRef", body["server"])
        self.assertEqual(body["os:scheduler_hints"], {"group": group})

    async def test_only_flavors_without_a_disk_get_a_volume_for_one(self) -> None:
        provider = await self.started_for_requests(diskless_gib=10, sizes=["m1.tiny", "m1.diskless"])
        for size in ("m1.tiny", "m1.diskless"):
            wanted = {"infranetes.io/instance-type": size}
            await self.within(provider.launch(self.spec(annotations=wanted)))
        with_disk, diskless = [body["server"] for body in self.world.bodies]
        self.assertNotIn("block_device_mapping_v2", with_disk)
        [volume] = diskless["block_device_mapping_v2"]
        self.assertEqual((volume["volume_size"], volume["delete_on_termination"]), (10, True))
        self.assertNotIn("volume_type", volume)
        self.assertNotIn("imageRef", diskless)

    async def test_annotations_are_served(self) -> None:
        other = self.world.api.add_image("other")
        network = self.world.api.add_network("inner")
        reserved = self.world.api.add_floating()
        provider = await self.started_for_requests(
            allowed_images=["other"], allowed_subnets=["in*"], allowed_security_groups=["web", "internal"]
        )
        wanted = {
            "infranetes.io/instance-type": "m1.medium",
            "infranetes.io/image": "other",
            "infranetes.io/subnet": "inner",
            "infranetes.io/security-groups": "web,internal",
            "infranetes.io/elastic-address": reserved,
        }
        launched = await self.within(provider.launch(self.spec(annotations=wanted)))
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        server = self.world.bodies[0]["server"]
        self.assertEqual((server["imageRef"], server["networks"]), (other, [{"uuid": network}]))
        self.assertEqual(server["security_groups"], [{"name": "web"}, {"name": "internal"}])
        self.assertEqual(launched.size, "m1.medium")
        self.assertIsNotNone(self.world.api.floating[reserved]["port_id"])
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [f"address {reserved}"])
        del self.world.api.floating[reserved]

    async def test_annotations_that_can_not_be_served_are_refused_by_name(self) -> None:
        provider = await self.started_for_requests(
            floating_network="", allowed_images=["*"], allowed_subnets=["*"], allowed_security_groups=["web"]
        )
        for name, value in (
            ("spot", "true"),
            ("spot_max_price", "0.1"),
            ("instance_profile", "web"),
            ("region", "elsewhere"),
            ("elastic_address", "web"),
            ("public_address", "true"),
            ("security_groups", "other"),
        ):
            words = await self.refusal(provider, **{name: value})
            self.assertIn(f"infranetes.io/{name.replace('_', '-')}", words)
        self.assertIn("no active image", await self.refusal(provider, image="none"))
        missing = {"infranetes.io/subnet": "none"}
        await self.refused(FailedPrecondition, provider.launch(self.spec(annotations=missing)))
        self.assertEqual(self.world.bodies, [])


class AddressTests(RequestCase, TestCase):
    """Floating addresses."""

    async def test_a_new_one_is_released_with_its_server(self) -> None:
        provider = await self.started_for_requests()
        launched = await self.within(provider.launch(self.spec(annotations=NEW)))
        instance = await self.within(provider.wait_running(launched.id, self.boot_timeout))
        [address] = self.world.api.floating.values()
        self.assertIn(f"infranetes-token={instance.token}", address["description"])
        self.assertLessEqual(len(address["description"]), 255)
        self.assertIn(address["floating_ip_address"], json.dumps(self.world.api.servers[launched.id]))
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_the_node_may_reach_agents_by_it(self) -> None:
        provider = await self.started_for_requests(public_address=True, agent_address="public")
        launched = await self.within(provider.launch(self.spec()))
        instance = await self.within(provider.wait_running(launched.id, self.boot_timeout))
        [address] = self.world.api.floating.values()
        self.assertEqual(instance.agent_host, address["floating_ip_address"])

    async def test_a_lost_answer_allocates_no_second_one(self) -> None:
        provider = await self.started_for_requests()
        lost = self.world.faults.add(FaultKind.LOST, "post floatingips", times=1)
        launched = await self.within(provider.launch(self.spec(annotations=NEW)))
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        self.assertEqual((lost.happened, len(self.world.api.floating)), (1, 1))

    async def test_those_that_no_server_has_are_released_and_others_are_not(self) -> None:
        provider = await self.started_for_requests(sweep_seconds=0.2)
        launched = await self.within(provider.launch(self.spec(annotations=NEW)))
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        foreign = self.world.api.add_floating(description="somebody's")
        self.world.api.delete(launched.id)  # by a user, who leaves the address
        await self.until(lambda: list(self.world.api.floating) == [foreign], "ours is released")
        del self.world.api.floating[foreign]

    async def test_one_that_the_project_does_not_have(self) -> None:
        provider = await self.started_for_requests()
        missing = {"infranetes.io/elastic-address": nova_resources.new_id()}
        launched = await self.within(provider.launch(self.spec(annotations=missing)))
        waiting = provider.wait_running(launched.id, self.boot_timeout)
        self.assertIn("elastic-address", str(await self.refused(InvalidArgument, waiting)))


class EndTests(RequestCase, TestCase):
    """Servers that do not come up, and how servers end."""

    async def test_a_quota_that_shows_late_is_told_and_the_server_is_deleted(self) -> None:
        self.world.fault_message = "Build of instance aborted: Maximum number of volumes exceeded"
        provider = await self.started_for_requests()
        self.world.faults.add(FaultKind.CAPACITY, "launch")
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn("number of volumes", str(error))
        self.assertEqual((len(self.world.bodies), self.world.holdings()), (1, []))

    async def test_a_fault_that_no_other_launch_would_mend(self) -> None:
        self.world.fault_message = "Build of instance aborted: Image is corrupt"
        provider = await self.started_for_requests()
        self.world.faults.add(FaultKind.CAPACITY, "launch")
        launched = await self.within(provider.launch(self.spec()))
        error = await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))
        self.assertIn("Image is corrupt", str(error))
        self.assertIn("console of", str(error))
        self.assertEqual(len(self.world.bodies), 1)

    async def test_a_refused_server_whose_end_is_answered_by_nobody_is_deleted_all_the_same(self) -> None:
        provider = await self.started_for_requests()
        self.world.faults.add(FaultKind.CAPACITY, "launch", times=1)
        lost = self.world.faults.add(FaultKind.LOST, "destroy", times=1)
        instance = await self.running(provider, self.spec())
        self.assertEqual((instance.zone, lost.happened), (ZONES[1], 1))
        self.assertEqual(self.world.running(), [instance.id])

    async def test_nobody_is_told_of_the_end_of_a_server_in_whose_place_another_is_launched(self) -> None:
        """Otherwise the pod would be given up, since both servers have its token."""
        provider = await self.started_for_requests(poll_seconds=0.05, settle_seconds=30.0)
        ended: list[Any] = []
        provider.watch(ended.append)
        self.world.launch_seconds = 0.5  # so that lists show it before it is in ERROR
        self.world.faults.add(FaultKind.CAPACITY, "launch", times=2)
        instance = await self.running(provider, self.spec())
        self.assertEqual(len(self.world.bodies), 3)
        self.assertEqual(ended, [])
        self.world.end(instance.id)
        await self.until(lambda: ended, "its own end is told")

    async def test_a_server_that_is_busy_is_asked_again_to_end(self) -> None:
        provider = await self.started_for_requests()
        instance = await self.running(provider, self.spec())
        busy = self.world.faults.add(FaultKind.BUSY, "destroy", times=2)
        await self.within(provider.destroy(instance.id))
        self.assertEqual((busy.happened, self.world.holdings()), (2, []))

    async def test_servers_of_a_cell_that_nova_can_not_reach_live_on(self) -> None:
        provider = await self.started_for_requests()
        ended: list[Any] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        other = await self.running(provider, self.spec())
        await self.sleep(1.1)  # until their launches do not count as new any more
        self.world.api.hidden = {instance.id}
        calls = self.world.faults.calls
        asked = calls.get("get server", 0)
        await self.until(lambda: calls.get("get server", 0) > asked + 2, "it is asked for by its id")
        self.world.end(other.id)
        await self.until(lambda: ended, "the ends of others are seen")
        self.assertIn("try again", str(await self.refused(Unavailable, provider.get(instance.id))))
        self.world.api.hidden = set()
        found = {one.id: one.state for one in await self.within(provider.list())}
        self.assertEqual(found, {instance.id: InstanceState.RUNNING, other.id: InstanceState.ENDED})
        self.assertEqual([one.id for one in ended], [other.id])


class TokenTests(RequestCase, TestCase):
    """Keystone's tokens."""

    async def test_all_threads_share_a_token(self) -> None:
        provider = await self.started_for_requests()
        for call in [self.within(provider.list()) for _ in range(12)]:
            await call
        self.assertEqual(self.actions().count("token"), 1)

    async def test_a_password_does_too(self) -> None:
        self.world.write_clouds(
            username=openstack.USERNAME,
            password=openstack.PASSWORD,
            user_domain_name="Default",
            project_name="pods",
        )
        provider = await self.started_for_requests()
        self.assertEqual(await self.within(provider.list()), [])

    async def test_a_token_that_is_refused_is_renewed_at_once(self) -> None:
        provider = await self.started_for_requests()
        self.world.revoke_tokens()
        self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(self.actions().count("token"), 2)
        self.assertEqual(provider.status()["calls"].partition(", ")[2], "0 failed")

    async def test_a_token_is_renewed_before_its_end(self) -> None:
        self.world.token_seconds = 2.0
        provider = await self.started_for_requests()
        await self.sleep(1.1)
        self.world.token_seconds = 3600.0
        self.assertEqual(await self.within(provider.list()), [])
        await self.until(lambda: self.actions().count("token") == 2, "there is another one")

    async def test_a_secret_can_be_replaced_in_place(self) -> None:
        self.world.write_clouds(application_credential_id="old", application_credential_secret="old")
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        self.assertIn("Keystone gives no token: 401", str(error))
        self.world.write_clouds(
            application_credential_id=openstack.APPLICATION, application_credential_secret=openstack.SECRET
        )
        await self.within(provider.start(lambda words: None))
        self.assertEqual(await self.within(provider.list()), [])


class CheckTests(RequestCase, TestCase):
    """What the configuration names must exist."""

    async def missing(self, **settings: Any) -> str:
        self.settings.update(settings)
        provider = self.make_provider()
        try:
            return str(await self.refused(FailedPrecondition, provider.start(lambda words: None)))
        finally:
            self.settings.update(self.world.table())

    async def test_what_is_not_there_is_named(self) -> None:
        self.assertIn("no active image gone", await self.missing(image="gone"))
        self.assertIn("no network gone", await self.missing(network="gone"))
        self.assertIn("no availability zone gone", await self.missing(zones=["gone"]))
        self.world.api.add_network("twice")
        self.world.api.add_network("twice")
        self.assertIn("2 networks called twice", await self.missing(network="twice"))
        unknown = nova_resources.new_id()
        self.assertIn(f"no network {unknown}", await self.missing(floating_network=unknown))

    async def test_an_openstack_that_is_too_old(self) -> None:
        newest, self.world.api.newest = self.world.api.newest, 65
        self.assertIn("older than Stein", await self.missing())
        self.world.api.newest = newest

    async def test_ids_do_as_well_as_names(self) -> None:
        api = self.world.api
        image = next(iter(api.images))
        provider = await self.started_for_requests(
            image=image, network=api.network, floating_network=api.outside, zones=[], security_groups=[]
        )
        launched = await self.within(provider.launch(self.spec()))
        server = self.world.bodies[0]["server"]
        self.assertEqual((server["imageRef"], launched.zone), (image, ""))
        self.assertNotIn("availability_zone", server)
        self.assertNotIn("security_groups", server)


class MachineImageTests(RequestCase, TestCase):
    """Images of VM-image pods."""

    async def test_the_newest_of_ours_with_the_name_and_version_is_found(self) -> None:
        api = self.world.api
        properties = {"infranetes": "true", "infranetes_image_name": "web", "infranetes_image_version": "1.0"}
        api.add_image("a", **properties)
        newest = api.add_image("b", **properties)
        api.add_image("c", **properties, owner="0" * 32)
        api.add_image("d", **properties, hw_architecture="aarch64")
        api.add_image("e", **properties, status="queued")
        provider = await self.started_for_requests()
        cloud: OpenStackCloud = provider._cloud
        find = lambda driver: cloud._thd_find_image(driver, "web", "1.0")  # noqa: E731
        found = await provider._calls.call("find", find)
        self.assertEqual((found.id, found.size), (newest, 1 << 30))
        exists = lambda driver: cloud._thd_has_image(driver, newest)  # noqa: E731
        self.assertTrue(await provider._calls.call("has", exists))
        del api.images[newest]
        self.assertFalse(await provider._calls.call("has", exists))
        with self.assertRaises(Exception) as caught:
            await provider._calls.call("find", lambda driver: cloud._thd_find_image(driver, "web", "2.0"))
        self.assertIn("infranetes_image_version=2.0", str(caught.exception))
