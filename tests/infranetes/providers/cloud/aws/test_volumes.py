# SPDX-License-Identifier: Apache-2.0
"""EBS volumes on a simulated EC2 over HTTP, which enforces the manual's IAM policy."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import gatherResults
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.interface import CLUSTER, NODE
from infranetes.providers.cloud.volumes.disks import VOLUME
from infranetes.providers.volumes import ZONE, IHasVolumes
from infranetes_common.concurrency import settled
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from tests.contract.attached_volumes import Attacher
from tests.contract.volumes import VolumesContract
from tests.infranetes.providers.cloud.case import AwsCase
from tests.infranetes.providers.cloud.volumes_case import CloudAttachedVolumesContract, CloudVolumesCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.moto import REGION

GIB = 1 << 30
STEPS = ("CreateVolume", "ModifyVolume", "AttachVolume", "DetachVolume", "DeleteVolume")


class AwsVolumesCase(AwsCase, CloudVolumesCase[Driver]):
    """Volumes on EC2. :ivar others: those that are not the cluster's."""

    def setUp(self) -> object:
        self.others: list[str] = []
        begun = super().setUp()
        self.settings["allowed_subnets"] = ["subnet-*"]
        return begun

    async def vm(self, subnet: str = "") -> str:
        wishes = {"infranetes.io/subnet": subnet} if subnet else {}
        return (await self.running(self.provider, self.spec(annotations=wishes))).id

    def disks(self) -> dict[str, Any]:
        """Return the cluster's volumes, as EC2 describes them, by their ids."""
        ours = [{"Name": f"tag:{CLUSTER}", "Values": [self.cluster]}, {"Name": "tag-key", "Values": [VOLUME]}]
        return {one["VolumeId"]: one for one in self.world.ec2.describe_volumes(Filters=ours)["Volumes"]}

    def holders(self, volume: str) -> list[str]:
        found = self.world.ec2.describe_volumes(VolumeIds=[volume])["Volumes"][0]
        return [each["InstanceId"] for each in found["Attachments"]]

    def has(self, machine: str, volume: str) -> bool:
        return machine in self.holders(volume)

    def other(self, zone: str = "a", **tags: str) -> str:
        """Create a volume as a user does; return its id."""
        tagged = [{"Key": key, "Value": value} for key, value in tags.items()]
        made = self.world.ec2.create_volume(Size=20, AvailabilityZone=f"{REGION}{zone}")
        self.others.append(made["VolumeId"])
        if tagged:
            self.world.ec2.create_tags(Resources=[made["VolumeId"]], Tags=tagged)
        return str(made["VolumeId"])

    def asked(self, action: str) -> list[dict[str, str]]:
        return [one for one in self.world.requests if one["Action"] == action]

    def leftovers(self) -> list[str]:
        """Return what VMs have left. Volumes outlive them, but must not be attached any more."""
        for id in [*self.disks(), *self.others]:
            self.assertEqual(self.holders(id), [])
            self.world.ec2.delete_volume(VolumeId=id)
        return super().leftovers()


class AwsVolumesTests(AwsVolumesCase, VolumesContract, TestCase):
    """The contract of volumes."""


class AwsAttachedVolumesTests(AwsVolumesCase, CloudAttachedVolumesContract[Driver], TestCase):
    """The contract of attached volumes."""

    has_modes = False
    of_attaching = ("AttachVolume", "DetachVolume")
    unknown_machine = "i-0123456789abcdef0"

    def serial(self, volume: str) -> str:
        return volume.replace("-", "")

    async def machine(self, attacher: Attacher) -> str:
        return await self.vm(self.world.subnets[0])


class DiskTests(AwsVolumesCase, TestCase):
    """Requests to EC2."""

    async def test_a_volume_says_whose_it_is_from_the_beginning(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("pvc-1 für Ada", 10 * GIB)
        [disk] = self.disks().values()
        tags = {tag["Key"]: tag["Value"] for tag in disk["Tags"]}
        self.assertEqual(tags, {CLUSTER: self.cluster, VOLUME: "pvc-1 für Ada"})
        self.assertEqual((disk["Size"], disk["VolumeType"], disk["Encrypted"]), (10, "gp3", False))
        self.assertEqual((made.zone, dict(volumes.topology)), (f"{REGION}a", {ZONE: f"{REGION}a"}))
        self.assertEqual(self.asked("CreateTags"), [])

    async def test_volumes_are_of_the_configured_type_and_zone_and_encrypted(self) -> None:
        key = "arn:aws:kms:eu-west-1:123456789012:key/1"
        self.settings |= {"volume_type": "gp2", "volume_zone": f"{REGION}b", "volume_key": key}
        made = await (await self.volumes()).create("data", GIB)
        disk = self.disks()[made.id]
        self.assertEqual((disk["VolumeType"], disk["Encrypted"], disk["KmsKeyId"]), ("gp2", True, key))
        self.assertEqual(made.zone, f"{REGION}b")

    async def test_it_outlives_its_vm_which_knows_it_by_its_serial_number(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.assertEqual(await volumes.attach(vm, made.id, False), made.id.replace("-", ""))
        [described] = [one for one in self.world.instances() if one["InstanceId"] == vm]
        ours = [one["Ebs"] for one in described["BlockDeviceMappings"] if one["Ebs"]["VolumeId"] == made.id]
        self.assertEqual([one["DeleteOnTermination"] for one in ours], [False])
        await self.within(self.provider.destroy(vm))
        self.assertEqual(await volumes.list(), [made])
        self.assertEqual(self.holders(made.id), [])

    async def test_the_sweep_of_what_vms_have_left_takes_no_volume(self) -> None:
        self.settings["sweep_seconds"] = 0.05
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        left = self.other(**{CLUSTER: self.cluster, NODE: self.node})
        await self.until(lambda: left not in self.all_volumes(), "what a VM has left is swept")
        self.others.remove(left)
        self.assertEqual(await volumes.list(), [made])

    def all_volumes(self) -> list[str]:
        return [one["VolumeId"] for one in self.world.ec2.describe_volumes()["Volumes"]]

    async def test_the_same_name_is_another_volume_in_another_cluster(self) -> None:
        volumes = await self.volumes()
        theirs = self.other(**{CLUSTER: "other", VOLUME: "data"})
        mine = await volumes.create("data", GIB)
        self.assertNotEqual(mine.id, theirs)
        self.assertEqual(await volumes.list(), [mine])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await volumes.delete(theirs)

    async def test_a_persons_volume_is_attached_once_it_is_tagged_and_never_deleted(self) -> None:
        """The policy requires the tag, so that nobody else's volume can be attached by its id."""
        volumes, vm = await self.volumes(), await self.vm()
        strange, theirs = self.other(), self.other(**{CLUSTER: self.cluster})
        self.assertEqual((await volumes.get(theirs)).size, 20 * GIB)
        with self.assertRaisesRegex(FailedPrecondition, "AttachVolume is not allowed for volume"):
            await volumes.attach(vm, strange, False)
        await volumes.attach(vm, theirs, False)
        self.assertTrue(self.has(vm, theirs))
        await volumes.detach(vm, theirs)
        for volume in (strange, theirs):
            with self.assertRaisesRegex(FailedPrecondition, "by hand"):
                await volumes.delete(volume)
        self.assertEqual(await volumes.list(), [])
        self.assertEqual(self.asked("DeleteVolume"), [])

    async def test_a_volume_of_another_zone_is_refused(self) -> None:
        volumes, vm = await self.volumes(), await self.vm(self.world.subnets[0])
        far = self.other("b", **{CLUSTER: self.cluster})
        with self.assertRaisesRegex(FailedPrecondition, "not in the same zone"):
            await volumes.attach(vm, far, False)

    async def test_without_subnets_a_zone_has_to_be_given(self) -> None:
        self.settings |= {"subnets": [], "security_groups": []}
        volumes = await self.volumes()
        self.assertEqual(dict(volumes.topology), {})
        with self.assertRaisesRegex(FailedPrecondition, "volume_zone"):
            await volumes.create("data", GIB)

    async def test_a_device_name_that_is_taken_is_left_alone(self) -> None:
        """Whatever uses it: the next name is tried."""
        volumes, vm = await self.volumes(), await self.vm()
        one, other = [await volumes.create(name, GIB) for name in ("one", "other")]
        await volumes.attach(vm, one.id, False)
        [device] = {call["Device"] for call in self.asked("AttachVolume")}
        await volumes.detach(vm, one.id)
        theirs = self.other()
        self.world.ec2.attach_volume(VolumeId=theirs, InstanceId=vm, Device=device)
        await volumes.attach(vm, one.id, False)
        await volumes.attach(vm, other.id, False)
        self.assertEqual([self.holders(id) for id in (one.id, other.id, theirs)], [[vm]] * 3)
        self.world.ec2.detach_volume(VolumeId=theirs, InstanceId=vm)
        for id in (one.id, other.id):
            await volumes.detach(vm, id)

    async def test_a_vm_with_as_many_volumes_as_it_can_have(self) -> None:
        self.world.volumes.most = 5
        volumes, vm = await self.volumes(), await self.vm()
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(5)])
        outcomes = await settled([volumes.attach(vm, each.id, False) for each in made])
        failures = [each for each in outcomes if not isinstance(each, str)]
        self.assertEqual(len(failures), 1, failures)
        self.assertIsInstance(failures[0].value, ResourceExhausted)
        self.assertIn("has 5 volumes", str(failures[0].value))
        await gatherResults([volumes.detach(vm, each.id) for each in made])

    async def test_a_second_growth_within_six_hours_says_so(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        with self.assertRaisesRegex(Unavailable, "at least 6 hours"):
            await volumes.expand(made.id, 3 * GIB)
        self.world.volumes.six_hours = False
        self.assertEqual((await volumes.expand(made.id, 3 * GIB)).size, 3 * GIB)

    async def test_a_detach_that_hangs_is_reported_and_ends_with_the_vm(self) -> None:
        """If the guest does not let go, the volume stays attached, and no other VM gets it."""
        volumes, vm, next_vm = await self.volumes(), await self.vm(), await self.vm()
        made = await volumes.create("data", GIB)
        await volumes.attach(vm, made.id, False)
        self.world.volumes.stuck.add(made.id)
        hurried = await self.hurried_volumes()
        with self.assertRaisesRegex(Unavailable, "detach volume"):
            await hurried.detach(vm, made.id)
        with self.assertRaises(Unavailable):
            await hurried.attach(next_vm, made.id, False)
        self.assertEqual(self.holders(made.id), [vm])
        volumes = await self.next_volumes(hurried)
        self.world.ec2.stop_instances(InstanceIds=[vm])  # now it certainly does not run
        await self.until_ended(vm)
        await volumes.detach(vm, made.id)
        self.assertEqual(self.asked("DetachVolume")[-1].get("Force"), "true")
        self.assertNotIn("Force", self.asked("DetachVolume")[0])
        await volumes.attach(next_vm, made.id, False)
        await volumes.detach(next_vm, made.id)

    async def test_only_this_vm_is_detached(self) -> None:
        """Whatever happens between the check and the call: the call names the VM."""
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        await volumes.attach(vm, made.id, False)
        await volumes.detach(vm, made.id)
        self.assertEqual({call["InstanceId"] for call in self.asked("DetachVolume")}, {vm})

    async def test_many_who_look_are_few_requests(self) -> None:
        """100 volumes at once: each is created by one request, and checks of all of them share requests."""
        volumes = await self.volumes()
        begun = len(self.world.requests)
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(100)])
        self.assertEqual(len({each.id for each in made}), 100)
        actions = [one["Action"] for one in self.world.requests[begun:]]
        self.assertEqual(actions.count("CreateVolume"), 100)
        self.assertLess(actions.count("DescribeVolumes"), 100)


class LostAnswerTests(AwsVolumesCase, TestCase):
    """A step takes effect, but its answer is lost."""

    async def life(self) -> None:
        """Take a volume through its life."""
        volumes = await self.volumes()
        vm = await self.vm()
        made = await volumes.create("data", GIB)
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        await volumes.attach(vm, made.id, False)
        self.assertEqual(self.holders(made.id), [vm])
        await volumes.detach(vm, made.id)
        self.assertEqual(self.holders(made.id), [])
        await volumes.delete(made.id)
        self.assertEqual((await volumes.list(), self.disks()), ([], {}))

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            self.world.volumes.seconds = 0.3  # then a repeated request gets a different answer
            faults = [self.world.faults.add(kind, action, times=2) for action in STEPS]
            await self.life()
            self.assertEqual([fault.happened for fault in faults], [2] * len(STEPS))
            self.world.faults.clear()

    async def test_refusals_that_pass_are_waited_for(self) -> None:
        for kind in (FaultKind.ERROR, FaultKind.THROTTLE):
            faults = [self.world.faults.add(kind, action, times=2) for action in STEPS]
            await self.life()
            self.assertEqual([fault.happened for fault in faults], [2] * len(STEPS))
            self.world.faults.clear()

    async def test_lists_that_lack_a_new_volume_make_no_second(self) -> None:
        """Nor does the next daemon create one, which knows nothing of the first one's request."""
        self.settings["settle_seconds"] = 20.0
        await self.volumes()
        stale = self.world.faults.add(FaultKind.STALE_VOLUMES, "DescribeVolumes")
        for _ in range(2):
            hurried = await self.hurried_volumes()
            with self.assertRaises(Unavailable):
                await hurried.create("data", GIB)
        self.assertEqual(len(self.disks()), 1)
        self.world.faults.rules.remove(stale)
        volumes = await self.next_volumes(hurried)
        made = await volumes.create("data", GIB)
        self.assertEqual(list(self.disks()), [made.id])


class NameTests(AwsVolumesCase, TestCase):
    """EC2 remembers requests for longer than the volume exists."""

    async def test_a_name_is_free_at_once_though_another_daemon_deleted_its_volume(self) -> None:
        self.settings |= {"volume_seconds": 5.0, "settle_seconds": 600.0}
        self.world.volumes.age = 601.0
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        other = await self.started(node=f"{self.node}-other")
        await IHasVolumes(other).volumes.delete(made.id)
        await self.within(other.stop())
        again = await volumes.create("data", GIB)
        self.assertNotEqual(again.id, made.id)
        self.assertEqual(list(self.disks()), [again.id])


class KilledTests(AwsVolumesCase, TestCase):
    """The daemon is killed right after a request took effect, and the next one goes on from there."""

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        self.world.volumes.seconds = 0.2
        await self.volumes()
        vm = await self.vm()
        await self.killed_at("CreateVolume", lambda volumes: volumes.create("data", GIB))
        [id] = self.disks()
        await self.killed_at("AttachVolume", lambda volumes: volumes.attach(vm, id, False))
        self.assertEqual(self.holders(id), [vm])
        await self.killed_at("DetachVolume", lambda volumes: volumes.detach(vm, id))
        self.assertEqual(self.holders(id), [])
        await self.killed_at("DeleteVolume", lambda volumes: volumes.delete(id))
        self.assertEqual(await deferToThread(self.disks), {})

    async def test_a_growth_is_finished_by_the_next_daemon(self) -> None:
        self.world.volumes.seconds = 0.2
        volumes = await self.volumes()
        id = (await volumes.create("data", GIB)).id
        grow = self.patient(lambda volumes: volumes.expand(id, 2 * GIB), "being modified")
        await self.killed_at("ModifyVolume", grow)
        self.assertEqual((await self.provider.volumes.get(id)).size, 2 * GIB)
