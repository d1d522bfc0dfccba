# SPDX-License-Identifier: Apache-2.0
"""A pod's VM is launched in the zone of its volumes."""

from __future__ import annotations

import attrs
from twisted.internet.defer import Deferred

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.providers.interface import Instance, InstanceSpec
from infranetes.providers.volumes import VolumeDisk
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.volumes.pod_volumes_case import VOLUMES, AtLaunchCase, ProviderWithVolumes, VolumesNode


class ZoneTests(AtLaunchCase):
    def test_a_vm_is_launched_where_the_volumes_are(self) -> None:
        self.volumes.zones = {"vol-data": "b", "vol-logs": "b"}
        self.run_pod(self.new)
        self.assertEqual([spec.request.zone for spec in self.world.provider.specs], ["", "b"])

    def test_a_volume_that_is_everywhere_goes_to_the_others_zone(self) -> None:
        self.volumes.zones = {"vol-logs": "c"}
        self.run_pod(self.new)
        self.assertEqual(self.world.provider.specs[-1].request.zone, "c")

    def test_volumes_of_two_zones_are_refused_before_anything_is_launched(self) -> None:
        self.volumes.zones = {"vol-data": "b", "vol-logs": "a"}
        for _ in range(2):
            words = str(self.failureResultOf(self.start(self.new), FailedPrecondition).value)
            for word in ("vol-data in b", "vol-logs in a", "one zone"):
                self.assertIn(word, words)
        self.assertEqual(len(self.world.provider.specs), 1, "that of the pod without volumes")
        self.assertEqual([one.id for one in self.world.store.contents().sandboxes], [self.sandbox])

    def test_a_zone_that_the_provider_does_not_launch_in_is_its_to_refuse(self) -> None:
        self.volumes.zones = {"vol-data": "far"}
        self.world.provider.launch_error = FailedPrecondition("this node makes VMs in a and b only")
        words = str(self.failureResultOf(self.start(self.new), FailedPrecondition).value)
        self.assertIn("in a and b only", words)
        self.assert_nobody_has_them()

    def test_a_provider_that_does_not_tell_has_the_pod_asked_for_again(self) -> None:
        self.volumes.get_error = Unavailable("throttled")
        self.failureResultOf(self.start(self.new), Unavailable)
        self.volumes.get_error = None
        self.volumes.zones = {"vol-data": "b"}
        self.run_pod(self.new)
        self.assertEqual(self.world.provider.specs[-1].request.zone, "b")

    def test_a_provider_that_hangs_is_not_waited_for(self) -> None:
        self.patch(self.volumes, "get", lambda volume: Deferred())
        launching = self.start(self.new)
        self.world.wait(61)
        self.failureResultOf(launching)

    def test_a_volume_that_is_not_there_is_the_container_s_to_tell(self) -> None:
        self.volumes.get_error = NotFound("no such volume")
        self.run_pod(self.new)
        self.assertEqual(self.world.provider.specs[-1].request.zone, "")

    def test_a_provider_is_asked_once_for_each(self) -> None:
        asked = []
        get = self.volumes.get

        def asking(volume: str) -> Deferred[VolumeDisk]:
            asked.append(volume)
            return get(volume)

        self.patch(self.volumes, "get", asking)
        self.run_pod(self.new)
        self.assertEqual(asked, ["vol-data", "vol-logs"])

    def test_the_next_daemon_looks_again(self) -> None:
        self.volumes.zones = {"vol-data": "b"}
        self.world.provider.launching = Deferred()
        launching = self.start(self.new)
        launching.addErrback(lambda _: None)
        self.world.kill()
        self.world.provider.launching = None
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual([spec.request.zone for spec in self.world.provider.specs], ["", "b", "b"])


class ZonedProvider(ProviderWithVolumes):
    """A provider that places VMs in the zones in turn."""

    async def _launch(self, spec: InstanceSpec) -> Instance:
        zone = "ab"[len(self.instances) % 2]
        made = await super()._launch(spec)
        self.instances[made.id] = attrs.evolve(made, zone=zone)
        return self.instances[made.id]


class ZonedNode(VolumesNode):
    def make_provider(self) -> FakeProvider:
        return ZonedProvider(self)


class PooledTests(PodsTestCase):
    """The VMs of the pool are in either zone."""

    world: ZonedNode

    def make_world(self) -> FakeNode:
        return ZonedNode(pool=PoolConfig(sizes=(PoolSize(count=2),), parallel=8, per_minute=100))

    def zone_of(self, sandbox: str) -> str:
        return self.world.provider.instances[self.record(sandbox).instance_id].zone

    def volumes_in(self, zone: str) -> None:
        provider = self.world.provider
        assert isinstance(provider, ProviderWithVolumes)
        provider.volumes.zones = {"vol-data": zone}
        self.world.of_pods["n1"] = VOLUMES[:1]

    def test_a_vm_in_the_volumes_zone_is_claimed_whichever_is_older(self) -> None:
        idle = {member.zone: member.id for member in self.world.node.pools.own.idle()}
        self.assertEqual(set(idle), {"a", "b"})
        self.volumes_in("b")
        self.assertEqual(self.run_pod(pod("new", uid="n1")), idle["b"])

    def test_without_one_there_the_pod_gets_its_own(self) -> None:
        idle = {member.id for member in self.world.node.pools.own.idle()}
        self.volumes_in("c")
        self.assertNotIn(self.run_pod(pod("new", uid="n1")), idle)
        self.assertIn("c", [spec.request.zone for spec in self.world.provider.specs])

    def test_the_next_daemon_learns_the_zones_of_the_vms_that_wait(self) -> None:
        self.world.restart()
        self.volumes_in("b")
        self.assertEqual(self.zone_of(self.run_pod(pod("new", uid="n1"))), "b")

    def test_a_vm_of_the_pool_gets_the_volumes_too(self) -> None:
        self.volumes_in("a")
        sandbox = self.run_pod(pod("new", uid="n1"))
        provider = self.world.provider
        assert isinstance(provider, ProviderWithVolumes)
        self.assertEqual(provider.volumes.at, {"vol-data": self.record(sandbox).instance_id})
