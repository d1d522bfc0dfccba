# SPDX-License-Identifier: Apache-2.0
"""Images are published to a simulated AWS that enforces the manual's IAM policy for publishers."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from botocore.session import Session
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.publish.aws import KEY, AwsPublisher
from infranetes.publish.aws_clients import connect, tags_of
from infranetes.publish.interface import ImageLabel, Publication, Published
from infranetes.publish.plan import BLOCK, scan
from infranetes_common import config
from infranetes_common.errors import InfranetesError, PermissionDenied, Unauthenticated
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.case import AwsCase
from tests.infranetes.publish import disks
from tests.support.clouds import aws_policy
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.ebs import SimulatedEbs
from tests.support.clouds.faults import FaultKind

STEPS = ("start_snapshot", "put_snapshot_block", "complete_snapshot", "register_image", "create_tags")


@lru_cache
def _session() -> Session:
    """Return the session of all tests: it reads AWS' models, which takes long, only once."""
    return Session()


class Killed(Exception):
    """Raised where the command is killed."""


class Publishing(TestCase):
    """A disk, and an account to publish it to."""

    world: SimulatedAws

    def begin(self) -> None:
        """Serve publishers, and make a disk."""
        self.world.policy = aws_policy.PUBLISHER
        self.ebs = SimulatedEbs(reactor, self.world)
        self.ebs.start()
        self.disk = disks.make(
            Path(self.mktemp()) / "disk.raw", {7: b"seven", 8: bytes(BLOCK), 90: b"x" * 2 * BLOCK}
        )
        self.journal = self.disk.with_name("disk.raw.aws.upload")
        self.publication = Publication(scan(self.disk), ImageLabel("docker"))
        self.reported: list[str] = []
        self.ended = False
        self.addCleanup(setattr, self, "ended", True)

    def publisher(self, protected: str = "") -> AwsPublisher:
        settings = config.structure(self.world.table(), Settings, source="test")
        ec2, ebs = connect(settings, self.ebs.endpoint, _session())
        return AwsPublisher(ec2, ebs, protected, sleep=self.pause)

    def pause(self, seconds: float) -> None:
        """Wait for what takes the cloud minutes, or until the test has ended."""
        if self.ended:
            raise Killed
        time.sleep(min(seconds, 0.05))

    def publish(
        self, publication: Publication | None = None, publisher: AwsPublisher | None = None
    ) -> Deferred[Published]:
        """Publish as the command does. Blocks."""
        publish = (publisher or self.publisher()).publish
        return deferToThread(publish, publication or self.publication, self.reported.append)

    async def killed(self, call: str, *, before: bool = False) -> None:
        """Publish, and be killed when one of botocore's calls has taken effect, or before it does."""
        publisher = self.publisher()
        client = publisher._ec2 if hasattr(publisher._ec2, call) else publisher._ebs
        original = getattr(client, call)

        def die(**arguments: object) -> None:
            if not before:
                original(**arguments)
            raise Killed

        self.patch(client, call, die)
        await self.assertFailure(self.publish(publisher=publisher), Killed)

    def images(self) -> list[str]:
        """Return the images that the publication made."""
        found = self.world.ec2.describe_images(
            Owners=["self"], Filters=[{"Name": "tag-key", "Values": [KEY]}]
        )
        return [each["ImageId"] for each in found["Images"] if self.publication.key == tags_of(each)[KEY]]

    def sent(self) -> int:
        """Return how many blocks were sent."""
        return self.ebs.requests.count("PutSnapshotBlock")


class PublishCase(Publishing):
    """An account that only publishers use."""

    def setUp(self) -> None:
        self.world = SimulatedAws(reactor, Path(self.mktemp()), "test")
        self.world.start()
        self.begin()

    async def tearDown(self) -> None:
        await self.ebs.stop()
        await self.world.stop()
        self.assertEqual(self.world.malformed, [])


class PublishTests(PublishCase):
    """The effects of a publication."""

    async def test_the_image_has_the_disk_and_only_blocks_with_data_are_sent(self) -> None:
        made = await self.publish()
        [snapshot] = self.ebs.snapshots()
        id = snapshot["SnapshotId"]
        self.assertEqual(sorted(self.ebs.blocks[id]), [0, 7, 90, 91])
        self.assertEqual(self.ebs.content(id, 92 * BLOCK), self.disk.read_bytes()[: 92 * BLOCK])
        [asked] = [each for each in self.world.requests if each["Action"] == "RegisterImage"]
        expected = {
            "Architecture": "x86_64",
            "VirtualizationType": "hvm",
            "BootMode": "legacy-bios",
            "EnaSupport": "true",
            "ImdsSupport": "v2.0",
            "RootDeviceName": "/dev/xvda",
            "BlockDeviceMapping.1.DeviceName": "/dev/xvda",
            "BlockDeviceMapping.1.Ebs.SnapshotId": id,
            "BlockDeviceMapping.1.Ebs.VolumeType": "gp3",
            "BlockDeviceMapping.1.Ebs.DeleteOnTermination": "true",
        }
        self.assertEqual({**asked, **expected}, asked)
        self.assertEqual(made.settings, {"image": made.image})
        self.assertEqual(self.images(), [made.image])
        self.assertEqual([path.name for path in self.disk.parent.iterdir()], ["disk.raw"])
        [last] = [line for line in self.reported if "100 %" in line]
        self.assertRegex(last, r"^upload to snap-[0-9a-f]+: 2\.0 MiB of 2\.0 MiB, 100 %, \d+ s")
        before = len(self.ebs.requests)
        self.assertEqual(await self.publish(), made)  # a repetition makes nothing
        self.assertEqual(len(self.ebs.requests), before)


class InterruptedTests(PublishCase):
    """A publication that is killed, or whose answers are lost."""

    async def test_killed_after_each_step_the_next_run_goes_on_and_nothing_is_left(self) -> None:
        for number, step in enumerate(STEPS):
            disk = disks.make(self.disk.with_name(f"{step}.raw"), {3: b"%d" % number, 5: b"five", 6: b"six"})
            self.publication = Publication(scan(disk), ImageLabel("docker"))
            await self.killed(step)
            made = await self.publish()
            self.assertEqual(self.images(), [made.image], step)
            self.assertEqual(len(self.ebs.snapshots()), number + 1, step)
            self.assertEqual(list(disk.parent.glob("*.upload*")), [], step)
        self.assertEqual(self.ebs.requests.count("StartSnapshot"), len(STEPS))
        self.assertEqual({each["State"] for each in self.ebs.snapshots()}, {"completed"})

    async def test_blocks_that_were_taken_are_not_sent_again(self) -> None:
        await self.killed("complete_snapshot", before=True)
        self.assertEqual(self.sent(), 4)
        await self.publish()
        self.assertEqual(self.sent(), 4)

    async def test_a_block_whose_line_in_the_journal_is_torn_is_sent_again(self) -> None:
        await self.killed("complete_snapshot", before=True)
        lines = self.journal.read_bytes()
        self.journal.write_bytes(lines.replace(b"90\n", b"").replace(b"91\n", b"") + b"9")
        await self.killed("complete_snapshot", before=True)
        self.assertEqual(self.sent(), 4 + 2)
        await self.publish()
        self.assertEqual(self.sent(), 4 + 2)

    async def test_without_its_journal_all_blocks_are_sent_to_the_same_snapshot(self) -> None:
        await self.killed("complete_snapshot", before=True)
        self.journal.unlink()
        await self.publish()
        self.assertEqual((self.sent(), len(self.ebs.snapshots())), (8, 1))

    async def test_lost_answers_make_nothing_twice(self) -> None:
        for action in ("StartSnapshot", "PutSnapshotBlock", "CompleteSnapshot", "RegisterImage"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        made = await self.publish()
        self.assertEqual(len(self.ebs.snapshots()), 1)
        self.assertEqual(self.images(), [made.image])

    async def test_a_snapshot_that_ebs_has_cancelled_is_replaced(self) -> None:
        await self.killed("put_snapshot_block")
        [old] = self.ebs.snapshots()
        self.ebs.cancel(old["SnapshotId"])
        made = await self.publish()
        [new] = self.ebs.snapshots()
        self.assertNotEqual(new["SnapshotId"], old["SnapshotId"])
        self.assertEqual(self.images(), [made.image])

    async def test_a_snapshot_that_somebody_has_deleted_is_replaced(self) -> None:
        await self.killed("put_snapshot_block")
        [old] = self.ebs.snapshots()
        self.world.ec2.delete_snapshot(SnapshotId=old["SnapshotId"])
        await self.publish()
        self.assertEqual(len(self.ebs.snapshots()), 1)

    async def test_a_snapshot_that_is_not_listed_yet_is_begun_by_the_same_token(self) -> None:
        await self.killed("start_snapshot")
        publisher = self.publisher()
        original = publisher._of_key
        answers = [[], *([original] * 9)]

        def unlisted(key: str) -> object:
            answer = answers.pop(0)
            return answer(key) if callable(answer) else answer

        self.patch(publisher, "_of_key", unlisted)
        await self.publish(publisher=publisher)
        self.assertEqual(self.ebs.requests.count("StartSnapshot"), 2)
        self.assertEqual(len(self.ebs.snapshots()), 1)

    async def test_a_snapshot_that_is_not_known_everywhere_yet_is_waited_for(self) -> None:
        self.ebs.unknown = 3
        await self.publish()
        self.assertEqual(self.sent(), 4 + 3)


class RefusedTests(PublishCase):
    """What an account refuses."""

    async def test_a_missing_permission_is_named(self) -> None:
        self.world.policy = aws_policy.POLICY  # the policy of nodes
        error = await self.assertFailure(self.publish(), PermissionDenied)
        self.assertIn("RegisterImage", str(error))
        self.assertIn("docs/publish-aws-policy.json", str(error))

    async def test_refused_credentials_are_named(self) -> None:
        self.world.faults.add(FaultKind.REVOKED, "DescribeImages")
        await self.assertFailure(self.publish(), Unauthenticated)

    async def test_a_disk_that_changes_meanwhile_is_refused(self) -> None:
        disks.make(self.disk, {7: b"other", 8: bytes(BLOCK), 90: b"x" * 2 * BLOCK})
        error = await self.assertFailure(self.publish(), InfranetesError)
        self.assertIn("Checksum mismatch", str(error))


class OldImagesTests(PublishCase):
    """Listing and removing."""

    async def test_images_are_listed_and_removed_with_their_snapshots(self) -> None:
        made = await self.publish()
        publisher = self.publisher()
        [image] = await deferToThread(publisher.images)
        self.assertEqual((image.id, image.kind, image.title), (made.image, "docker", made.title))
        self.assertEqual(list(image.parts), [each["SnapshotId"] for each in self.ebs.snapshots()])
        self.assertEqual(image.used_by, "")
        for _ in range(2):
            await deferToThread(publisher.remove, image)
        self.assertEqual((self.images(), self.ebs.snapshots()), ([], []))

    async def test_a_snapshot_that_never_became_an_image_is_listed_and_removed(self) -> None:
        await self.killed("put_snapshot_block")
        publisher = self.publisher()
        [left] = await deferToThread(publisher.images)
        self.assertEqual((left.used_by, left.title), ("it is being written", self.publication.title))
        self.ebs.cancel(left.id)
        [left] = await deferToThread(publisher.images)
        self.assertEqual((left.used_by, list(left.parts)), ("", [left.id]))
        await deferToThread(publisher.remove, left)
        self.assertEqual(self.ebs.snapshots(), [])

    async def test_the_configured_image_says_so(self) -> None:
        made = await self.publish()
        [image] = await deferToThread(self.publisher(protected=made.image).images)
        self.assertEqual(image.used_by, "the configuration names it")


class ProviderTests(AwsCase, Publishing):
    """A node's provider uses published images, with the node's own policy."""

    def setUp(self) -> object:
        result = super().setUp()
        self.begin()
        return result

    async def clean_up(self) -> None:
        self.world.policy = aws_policy.POLICY
        await super().clean_up()

    async def finish(self) -> None:
        await self.ebs.stop()
        await super().finish()

    async def test_it_launches_pods_and_finds_the_images_that_are_pods(self) -> None:
        made = await self.publish()
        web = await self.publish(Publication(self.publication.disk, ImageLabel("machine", "team/web:1.0")))
        self.world.policy = aws_policy.POLICY
        self.settings["image"] = made.image
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        found = await self.within(provider.catalogue.find("team/web:1.0", {}))
        self.assertEqual(found.machine, web.image)
        launched = await self.within(provider.launch(self.spec()))
        [seen] = self.world.seen()
        self.assertEqual((seen.id, seen.image), (launched.id, made.image))
        self.world.policy = aws_policy.PUBLISHER
        shown = await deferToThread(self.publisher().images)
        used = {image.id: image.used_by for image in shown}
        self.assertEqual(used, {made.image: f"instance {launched.id} uses it", web.image: ""})
