# SPDX-License-Identifier: Apache-2.0
"""What the provider of any driver makes of nodes as drivers tell them, and what it gives to `create_node`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from libcloud.common.exceptions import BaseHTTPError
from libcloud.compute.base import Node, NodeImage, NodeLocation, NodeSize
from libcloud.compute.types import NodeState
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.any import names
from infranetes.providers.cloud.any.cloud import AnyCloud
from infranetes.providers.cloud.any.credentials import Session
from infranetes.providers.cloud.any.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind, LaunchRequest
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.config import structure
from infranetes_common.errors import FailedPrecondition, InvalidArgument

OWNER = names.owner_of("cluster", "node-1")
TOKEN, SANDBOX = "1" * 32, "2" * 32
NAME = names.name_of(OWNER, TOKEN, SANDBOX, 0)


class StubDriver:
    """A driver in whose hands nothing happens. :ivar given: to `create_node`."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.given: dict[str, Any] = {}
        self.destroyed: list[Any] = []
        self.refusal: Exception | None = None
        self.new_id: Any = 77

    def list_nodes(self, **arguments: Any) -> list[Any]:
        return self.nodes

    def list_sizes(self, location: Any = None) -> list[Any]:
        return [NodeSize("s-1", "s-1", 1024, 25, 0, 0.01, self, {"regions": ["a"]}), self.elsewhere]

    elsewhere = NodeSize("s-2", "s-2", 2048, 25, 0, 0.02, None, {"regions": ["z"]})

    def list_images(self) -> list[Any]:
        return [NodeImage(9, "pod", self), NodeImage(8, "twice", self), NodeImage(7, "twice", self)]

    def list_locations(self) -> list[Any]:
        return [NodeLocation("a", "Here", "", self), NodeLocation("b", "There", "", self)]

    def create_node(self, **arguments: Any) -> Any:
        self.given = arguments
        return node(self.new_id, NodeState.PENDING, private_ips=[])

    def destroy_node(self, node: Any) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.destroyed.append(node.id)
        return False  # as some do though the cloud has said 204


def node(id: Any, state: Any, name: str | None = NAME, **more: Any) -> Any:
    told = {"public_ips": ["203.0.113.1"], "private_ips": ["10.0.0.1"], **more}
    return Node(id, name, state, told.pop("public_ips"), told.pop("private_ips"), None, **told)


class CloudCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.driver = StubDriver()
        untyped: Any = self.driver
        self.session = Session(untyped, ())
        self.cloud = self.make()

    def make(self, **table: Any) -> AnyCloud:
        given = {
            "driver": "digitalocean",
            "credentials_file": "/x",
            "image": "pod",
            "locations": ["Here", "b"],
            **table,
        }
        directory = Path(self.mktemp())
        context = ProviderContext(directory, directory, "cluster", "node-1")
        return AnyCloud(structure(given, Settings, source="test"), context)

    def checked(self, **table: Any) -> AnyCloud:
        cloud = self.make(**table)
        cloud._thd_check(self.session)
        return cloud

    def request(self, **more: Any) -> LaunchRequest:
        given = {
            "number": 0,
            "tags": {},
            "identity": b"{}",
            "wishes": Wishes(),
            "size": "s-1",
            "zone": "a",
            **more,
        }
        return LaunchRequest(TOKEN, SANDBOX, **given)


class NodeTests(CloudCase):
    def listed(self, *nodes: Any) -> list[Any]:
        self.driver.nodes = list(nodes)
        return self.cloud._thd_list(self.session)

    def test_states(self) -> None:
        """A state that is not known ends no pod."""
        expected = {
            NodeState.RUNNING: InstanceState.RUNNING,
            NodeState.STOPPED: InstanceState.ENDED,
            NodeState.SUSPENDED: InstanceState.ENDED,
            NodeState.TERMINATED: InstanceState.ENDED,
            NodeState.ERROR: InstanceState.ENDED,
        }
        sleeping = (NodeState.PAUSED, NodeState.STOPPING, NodeState.RECONFIGURING, NodeState.UPDATING)
        moving = (NodeState.PENDING, NodeState.STARTING, NodeState.REBOOTING, NodeState.MIGRATING)
        others = (*sleeping, *moving, NodeState.UNKNOWN, "made up")
        for state in (*expected, *others):
            [vm] = self.listed(node(1, state))
            self.assertIs(vm.state, expected.get(state, InstanceState.PENDING), state)
            self.assertEqual((vm.gone, vm.failed), (state == NodeState.TERMINATED, state == NodeState.ERROR))

    def test_a_vm_that_was_just_made_and_is_stopped_is_about_to_start(self) -> None:
        """Until it has been seen to run, or should have been."""
        cloud = self.checked(settle_seconds=1000.0)
        cloud._thd_launch(self.session, self.request())
        seen = []
        for state in (NodeState.STOPPED, NodeState.RUNNING, NodeState.STOPPED):
            self.driver.nodes = [node(77, state)]
            seen += [vm.state for vm in cloud._thd_list(self.session)]
        self.assertEqual(seen, [InstanceState.PENDING, InstanceState.RUNNING, InstanceState.ENDED])
        cloud = self.checked(settle_seconds=0.0)
        cloud._thd_launch(self.session, self.request())
        self.driver.nodes = [node(77, NodeState.STOPPED)]
        self.assertEqual([vm.state for vm in cloud._thd_list(self.session)], [InstanceState.ENDED])

    def test_only_nodes_with_our_names_are_ours(self) -> None:
        other = names.name_of(names.owner_of("cluster", "node-2"), TOKEN, SANDBOX, 0)
        found = self.listed(
            *(node(i, NodeState.RUNNING, each) for i, each in enumerate((other, NAME, "web", None)))
        )
        self.assertEqual([(vm.id, vm.token, vm.sandbox_id) for vm in found], [("1", TOKEN, SANDBOX)])
        self.assertIsNone(self.cloud._thd_get(self.session, "2"))

    def test_addresses_that_are_none_are_left_out(self) -> None:
        for told, expected in (
            (["0.0.0.0"], ""),
            ([], ""),
            (None, ""),
            (["2001:db8::1", "10.0.0.2", "10.0.0.3"], "10.0.0.2"),
            (["not an address"], ""),
        ):
            [vm] = self.listed(node(1, NodeState.RUNNING, private_ips=told))
            self.assertEqual(vm.private_address, expected)
        [vm] = self.listed(node(1, NodeState.RUNNING))
        self.assertEqual((vm.private_address, vm.public_address), ("10.0.0.1", "203.0.113.1"))

    def test_the_pods_address_may_be_the_public_one(self) -> None:
        self.cloud = self.make(pod_address="public")
        [vm] = self.listed(node(1, NodeState.RUNNING))
        self.assertEqual((vm.private_address, vm.public_address), ("203.0.113.1", "203.0.113.1"))

    def test_times_are_read_as_drivers_tell_them(self) -> None:
        at = datetime(2026, 11, 29, 9, 0, 0, tzinfo=UTC)
        for told in (at, at.replace(tzinfo=None), "2026-11-29T09:00:00+00:00", "2026-11-29T09:00:00Z"):
            self.assertEqual(
                self.listed(node(1, NodeState.RUNNING, created_at=told))[0].created_at, at.timestamp()
            )
            extra = {"created": told}
            self.assertEqual(
                self.listed(node(1, NodeState.RUNNING, extra=extra))[0].created_at, at.timestamp()
            )
        for strange in (None, "yesterday", 7):
            self.assertEqual(self.listed(node(1, NodeState.RUNNING, created_at=strange))[0].created_at, 0.0)

    def test_a_size_is_an_object_or_a_name(self) -> None:
        size = NodeSize("s-1", "Small", 1024, 25, 0, 0.01, None)
        for told, expected in ((size, "s-1"), ("s-1", "s-1"), (None, "")):
            self.assertEqual(self.listed(node(1, NodeState.RUNNING, size=told))[0].size, expected)


class LaunchTests(CloudCase):
    def test_create_node_gets_what_the_driver_calls_so(self) -> None:
        cloud = self.checked(create={"ex_create_attr": {"ipv6": True}}, user_data="ex_create_attr.user_data")
        vm = cloud._thd_launch(self.session, self.request(identity=b'{"a": 1}'))
        given = self.driver.given
        self.assertEqual(given["ex_create_attr"], {"ipv6": True, "user_data": '{"a": 1}'})
        self.assertEqual((given["name"], given["size"].id), (NAME, "s-1"))
        self.assertEqual((given["image"].id, given["location"].id), ("9", "a"))
        self.assertEqual(set(given), {"name", "size", "image", "location", "ex_create_attr"})
        self.assertEqual((vm.id, vm.token, vm.sandbox_id, vm.size), ("77", TOKEN, SANDBOX, "s-1"))
        self.assertGreater(vm.created_at, 0)

    def test_each_vm_has_a_password_of_its_own_where_one_is_needed(self) -> None:
        cloud = self.checked(driver="vultr")
        cloud._dialect = type(cloud._dialect)("ex_userdata", password="root_pass")
        found = set()
        for number in range(3):
            cloud._thd_launch(self.session, self.request(number=number))
            found.add(self.driver.given["root_pass"])
        self.assertEqual(len(found), 3)
        self.assertGreater(min(map(len, found)), 30)

    def test_a_node_without_an_id_may_exist(self) -> None:
        """As a driver's that doesn't wait for it: it is looked for, and not asked for again."""
        cloud = self.checked()
        self.driver.new_id = None
        error = self.assertRaises(CloudError, cloud._thd_launch, self.session, self.request())
        self.assertIs(error.kind, ErrorKind.TRANSIENT)
        error = self.assertRaises(CloudError, cloud._thd_launch, self.session, self.request())
        self.assertIs(error.kind, ErrorKind.CONFLICT)
        self.driver.nodes = [node(78, NodeState.RUNNING)]
        self.assertEqual(cloud._thd_launch(self.session, self.request()).id, "78")

    def test_the_oldest_of_several_vms_of_a_name_is_the_tokens(self) -> None:
        cloud = self.checked()
        at = datetime(2026, 11, 29, tzinfo=UTC)
        self.driver.nodes = [
            node(5, NodeState.RUNNING, created_at=at.replace(hour=3)),
            node(6, NodeState.RUNNING, created_at=at.replace(hour=2)),
        ]
        self.assertEqual(cloud._thd_launch(self.session, self.request()).id, "6")

    def test_a_size_that_is_no_longer_sold_leaves_others_to_be_tried(self) -> None:
        cloud = self.checked()
        error = self.assertRaises(CloudError, cloud._thd_launch, self.session, self.request(size="s-9"))
        self.assertIs(error.kind, ErrorKind.CAPACITY)
        cloud._thd_launch(self.session, self.request())


class CheckTests(CloudCase):
    def refused(self, *words: str, **table: Any) -> None:
        error = self.assertRaises(FailedPrecondition, self.checked, **table)
        for each in ("providers.libcloud", *words):
            self.assertIn(each, str(error))

    def test_what_the_configuration_names_has_to_exist(self) -> None:
        self.refused("locations", "none called nowhere", locations=["nowhere"])
        self.refused("image", "none called lost", image="lost")
        self.refused("image", "several called twice", image="twice")
        self.checked(image="8")

    def test_sizes_that_are_not_sold_here_are_left_out(self) -> None:
        self.assertEqual([each.name for each in self.checked().offers], ["s-1"])

    def test_own_prices_come_and_go(self) -> None:
        cloud = self.checked()
        for prices, expected in (({}, 0.01), ({"s-1": 0.5}, 0.5), ({}, 0.01)):
            cloud.use_prices(prices)
            self.assertEqual([each.price for each in cloud.offers], [expected])

    def test_a_pod_may_choose_one_of_the_locations(self) -> None:
        cloud = self.checked()
        self.assertEqual(cloud.zones(Wishes()), ["a", "b"])
        for region in ("a", "Here"):
            cloud.check_wishes(Wishes(region=region))
            self.assertEqual(cloud.zones(Wishes(region=region)), ["a"])
        for wishes in (
            Wishes(region="c"),
            Wishes(subnet="s"),
            Wishes(spot=True),
            Wishes(elastic_address="new"),
        ):
            self.assertRaises(InvalidArgument, cloud.check_wishes, wishes)


class DestroyTests(CloudCase):
    def destroy(self, id: str = "5") -> bool:
        [vm] = [self.cloud._vm(node(id, NodeState.RUNNING))]
        return self.cloud._thd_destroy(self.session, vm)

    def test_what_a_driver_returns_is_no_answer(self) -> None:
        self.driver.nodes = [node(5, NodeState.RUNNING)]
        self.assertTrue(self.destroy())
        self.assertEqual(self.driver.destroyed, ["5"])

    def test_a_vm_that_is_busy_is_asked_for_again(self) -> None:
        self.driver.nodes = [node(5, NodeState.RUNNING)]
        self.driver.refusal = BaseHTTPError(422, "Droplet already has a pending event.")
        self.assertFalse(self.destroy())
        self.driver.refusal = None
        self.assertTrue(self.destroy())

    def test_one_that_is_gone_is_not_found(self) -> None:
        self.assertIs(self.assertRaises(CloudError, self.destroy).kind, ErrorKind.NOT_FOUND)
        self.driver.nodes = [node(5, NodeState.RUNNING)]
        self.driver.refusal = BaseHTTPError(404, "gone")
        self.assertRaises(BaseHTTPError, self.destroy)

    def test_one_that_no_list_has_yet_is_destroyed(self) -> None:
        self.cloud = self.checked()
        vm = self.cloud._thd_launch(self.session, self.request())
        self.assertTrue(self.cloud._thd_destroy(self.session, vm))
        self.assertEqual(self.driver.destroyed, ["77"])
