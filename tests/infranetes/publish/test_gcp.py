# SPDX-License-Identifier: Apache-2.0
"""Images are published to a simulated Compute Engine that enforces the manual's role for publishers."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from itertools import count
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.gcp import credentials
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.publish import command, gcp_storage, resumable
from infranetes.publish.gcp import GcpPublisher
from infranetes.publish.gcp_storage import Storage
from infranetes.publish.interface import ImageLabel, Publication, Published
from infranetes.publish.plan import BLOCK, scan
from infranetes.publish.resumable import Outcome, ResumableUpload
from infranetes_common import config
from infranetes_common.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from tests.contract.pod_provider_case import reactor
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.case import GcpCase
from tests.infranetes.publish import disks
from tests.support.clouds import gce_permissions
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.gce_resources import ZONES
from tests.support.clouds.gcs import BUCKET, SimulatedStorage
from tests.support.clouds.google_identity import ACCOUNT, POOL, write

CHUNK = 256 * 1024
STEPS = (
    ("storage", "_begin"),
    ("storage", "_send"),
    ("storage", "upload"),
    ("driver", "insert_image"),
    ("storage", "delete"),
)


class Killed(Exception):
    """Raised where the command is killed."""


@needs_tools("wheels")
class Publishing(TestCase):
    """A disk, and a project to publish it to."""

    world: SimulatedGce

    def begin(self) -> None:
        """Serve publishers, and make a disk."""
        self.world.role = gce_permissions.PUBLISHER
        self.world.operation_seconds = 0.02
        self.storage = SimulatedStorage(reactor, self.world)
        self.storage.start()
        self.patch(resumable, "CHUNK", CHUNK)
        noise = bytes(range(256)) * (BLOCK // 256)
        self.disk = disks.make(Path(self.mktemp()) / "disk.raw", {7: b"seven", 900: noise})
        self.publication = Publication(scan(self.disk), ImageLabel("docker"))
        self.reported: list[str] = []
        self.opened: list[GcpPublisher] = []
        self.ended = False
        self.addCleanup(setattr, self, "ended", True)

    async def end(self) -> None:
        """Stop serving."""
        for publisher in self.opened:
            publisher.close()
        await self.storage.stop()

    def pause(self, seconds: float) -> None:
        """Wait for what takes the cloud minutes, or until the test has ended."""
        if self.ended:
            raise Killed
        time.sleep(min(seconds, 0.02))

    def publisher(self, configured: str = "", bucket: str = BUCKET) -> GcpPublisher:
        settings = config.structure(self.world.table(), Settings, source="test")
        who = credentials.Credentials(settings, gcp_storage.SCOPES)
        driver = Driver(settings.project, who, 5.0, settings.endpoint)
        storage = Storage(bucket, who, self.storage.endpoint, 5.0, self.pause)
        made = GcpPublisher(driver, storage, settings.zones, configured, sleep=self.pause)
        self.opened.append(made)
        return made

    def publish(
        self, publication: Publication | None = None, publisher: GcpPublisher | None = None
    ) -> Deferred[Published]:
        """Publish as the command does. Blocks."""
        publish = (publisher or self.publisher()).publish
        return deferToThread(publish, publication or self.publication, self.reported.append)

    async def killed(self, what: str, method: str, *, before: bool, passes: int = 0) -> None:
        """Publish, and be killed when a call has taken effect, or before it does.

        :param passes: how many such calls succeed before that."""
        publisher = self.publisher()
        owner = getattr(publisher, f"_{what}")
        original = getattr(owner, method)

        calls = count()

        def die(*arguments: object) -> object:
            is_last = next(calls) == passes
            answer = original(*arguments) if not (is_last and before) else None
            if is_last:
                raise Killed
            return answer

        self.patch(owner, method, die)
        await self.assertFailure(self.publish(publisher=publisher), Killed)

    def images(self) -> list[str]:
        """Return the images that were published."""
        return [
            name for name, one in self.world.api.images.items() if "infranetes-publication" in one["labels"]
        ]


class PublishCase(Publishing):
    """A project that only publishers use."""

    def setUp(self) -> None:
        self.world = SimulatedGce(reactor, Path(self.mktemp()))
        self.world.start()
        self.begin()

    async def tearDown(self) -> None:
        await self.end()
        await self.world.stop()
        self.assertEqual(self.world.malformed, [])


class PublishTests(PublishCase):
    """The effects of a publication."""

    async def test_the_image_has_the_disk_and_nothing_else_is_left(self) -> None:
        made = await self.publish()
        self.assertEqual(self.images(), [made.title])
        image = self.world.api.images[made.title]
        self.assertEqual(image["diskSizeGb"], "1")
        imported = Path(self.mktemp())
        with imported.open("wb") as file:
            file.truncate(1 << 30)
            for begin, content in self.world.api.importing.contents[made.title].items():
                file.seek(begin)
                file.write(content)
        self.assertEqual(scan(imported).digests, self.publication.disk.digests)
        self.assertEqual((image["family"], image["architecture"]), ("infranetes-docker", "X86_64"))
        features = {each["type"] for each in image["guestOsFeatures"]}
        expected = {"GVNIC", "SEV_SNP_CAPABLE", "UEFI_COMPATIBLE", "VIRTIO_SCSI_MULTIQUEUE"}
        self.assertEqual(features, expected)
        self.assertEqual(self.storage.objects, {})
        self.assertEqual([path.name for path in self.disk.parent.iterdir()], ["disk.raw"])
        self.assertIn("100 %", "\n".join(self.reported))

    async def test_publishing_it_again_makes_nothing(self) -> None:
        first = await self.publish()
        parts = self.storage.requests.count("part")
        self.assertEqual(await self.publish(), first)
        self.assertEqual(self.storage.requests.count("part"), parts)

    async def test_a_missing_bucket_is_named(self) -> None:
        error = await self.assertFailure(
            self.publish(publisher=self.publisher(bucket="other")), InvalidArgument
        )
        self.assertIn("gcloud storage buckets create gs://other", str(error))

    async def test_a_disk_of_other_than_whole_gib_is_refused(self) -> None:
        disk = disks.make(self.disk.with_name("odd.raw"), {}, (1 << 30) + 512)
        odd = Publication(scan(disk), ImageLabel("docker"))
        await self.assertFailure(self.publish(odd), InvalidArgument)

    async def test_a_missing_permission_is_named(self) -> None:
        self.world.role = gce_permissions.ROLE  # the role of nodes
        error = await self.assertFailure(self.publish(), PermissionDenied)
        self.assertIn("compute.images.create", str(error))

    async def test_missing_credentials_are_named(self) -> None:
        self.world.key_file.unlink()
        error = await self.assertFailure(self.publish(), Unauthenticated)
        self.assertIn(f"no credentials: key_file {self.world.key_file} can't be read", str(error))
        self.assertNotIn("role", str(error))  # no permission is missing


class InterruptedTests(PublishCase):
    """A publication that is killed, or whose answers are lost."""

    async def test_killed_at_each_step_the_next_run_goes_on_and_nothing_is_left(self) -> None:
        for before in (False, True):
            for number, (what, method) in enumerate(STEPS):
                content = b"%d %d" % (before, number)
                disk = disks.make(self.disk.with_name(f"{method}-{before}.raw"), {3: content})
                self.publication = Publication(scan(disk), ImageLabel("docker"))
                await self.killed(what, method, before=before)
                made = await self.publish()
                self.assertEqual(self.images()[-1:], [made.title])
                self.assertEqual(self.storage.objects, {}, method)
                self.assertEqual([path.name for path in disk.parent.glob(f"{disk.name}*")], [disk.name])
        self.assertEqual(len(self.images()), 2 * len(STEPS))

    async def test_what_was_kept_is_not_sent_again(self) -> None:
        disk = disks.make(self.disk.with_name("noise.raw"), {2: os.urandom(2 * BLOCK)})  # four parts and more
        self.publication = Publication(scan(disk), ImageLabel("docker"))
        self.storage.keeps = [CHUNK, 1000]
        await self.killed("storage", "_send", before=True, passes=2)
        [session] = self.storage.sessions.values()
        self.assertEqual(len(session.kept), CHUNK + 1000)
        await self.publish()
        self.assertEqual(len(self.storage.sessions), 1)
        self.assertIn("were sent before", "\n".join(self.reported))

    async def test_lost_answers_make_nothing_twice(self) -> None:
        for action in ("begin", "part", "insert image", "delete object"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        await self.assertFailure(self.publish(), Unavailable)  # the import, which the next run repeats
        made = await self.publish()
        self.assertEqual(self.images(), [made.title])
        self.assertEqual(self.storage.objects, {})

    async def test_failures_that_pass_are_sat_out(self) -> None:
        for action in ("begin", "part", "find", "delete object"):
            self.world.faults.add(FaultKind.ERROR, action, times=2)
        made = await self.publish()
        self.assertEqual(self.images(), [made.title])

    async def test_an_expired_session_is_replaced(self) -> None:
        await self.killed("storage", "_send", before=True)
        self.storage.sessions.clear()
        made = await self.publish()
        self.assertEqual(self.images(), [made.title])

    async def test_an_import_that_has_failed_is_made_again(self) -> None:
        self.world.api.operations.failing["insert"] = ("INTERNAL_ERROR", "An internal error occurred.")
        await self.assertFailure(self.publish(), Unavailable)
        made = await self.publish()
        self.assertEqual(self.images(), [made.title])
        self.assertEqual(self.world.api.images[made.title]["status"], "READY")

    async def test_a_token_that_was_revoked_is_renewed(self) -> None:
        publisher = self.publisher()
        await deferToThread(publisher.images)
        self.world.revoke_tokens()
        made = await self.publish(publisher=publisher)
        self.assertEqual(self.images(), [made.title])

    async def test_no_token_for_a_while_is_waited_for(self) -> None:
        storage = self.publisher()._storage
        assert storage is not None
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                self.world.identity.refusal = None

        self.patch(storage, "_sleep", pause)
        with self.world.identity.refusing(503):
            self.assertIsNone(await deferToThread(storage.find, "disk.tar.gz"))
        self.assertEqual(pauses, [1.0, 2.0])
        write(self.world.key_file, {**self.world.identity.key(), "client_email": "nobody@example.com"})
        self.world.revoke_tokens()
        with self.assertRaises(CloudError) as caught:
            await deferToThread(storage.find, "disk.tar.gz")
        self.assertIs(caught.exception.kind, ErrorKind.CREDENTIALS)
        self.assertEqual(len(pauses), 2)

    async def test_whoever_publishes_may_be_another_issuers_identity_by_a_service_account(self) -> None:
        token = self.disk.with_name("token")
        token.write_text("header.payload.signature")
        identity = self.world.identity
        identity.subjects[token.read_text()] = "publisher"
        identity.impersonators.add((f"{POOL}publisher", ACCOUNT))
        write(self.world.key_file, identity.external({"file": str(token)}, ACCOUNT))
        made = await self.publish()
        self.assertEqual(self.images(), [made.title])


class OldImagesTests(PublishCase):
    """Listing and removing."""

    async def test_by_the_command(self) -> None:
        table = self.world.table()
        del table["image"]  # since it does not exist yet
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        path = self.disk.with_name("infranetes.toml")
        path.write_text("[providers.gcp]\n" + "\n".join(lines) + "\n")
        out = io.StringIO()
        self.patch(sys, "stdout", out)
        self.patch(sys, "stderr", io.StringIO())
        where = ["--config", str(path), "--json"]
        bucket = ["--bucket", BUCKET, "--storage-endpoint", self.storage.endpoint]
        publish = ["publish", "gcp", "--disk", str(self.disk), *bucket, *where]
        self.assertEqual(await deferToThread(command.main, publish), 0)
        made = json.loads(out.getvalue())
        self.assertEqual(made["settings"], {"image": made["image"]})
        out.truncate(out.seek(0))
        self.assertEqual(await deferToThread(command.main, ["images", "gcp", "--keep", "1", *where]), 0)
        [image] = json.loads(out.getvalue())["images"]
        self.assertEqual((image["title"], image["used_by"]), (made["title"], ""))

    async def test_images_are_listed_and_removed(self) -> None:
        made = await self.publish(Publication(self.publication.disk, ImageLabel("machine", "team/web:1.0")))
        publisher = self.publisher()
        [image] = await deferToThread(publisher.images)
        self.assertEqual((image.title, image.kind, image.name), (made.title, "machine", "team/web:1.0"))
        self.assertEqual(image.used_by, "")
        for _ in range(2):
            await deferToThread(publisher.remove, image)
        self.assertEqual(self.images(), [])

    async def test_the_configured_image_or_the_newest_of_its_family_says_so(self) -> None:
        made = await self.publish()
        for configured in (made.title, made.image, "family/infranetes-docker"):
            [image] = await deferToThread(self.publisher(configured).images)
            self.assertEqual(image.used_by, "the configuration names it", configured)
        [image] = await deferToThread(self.publisher("family/other").images)
        self.assertEqual(image.used_by, "")
        disk = self.world.api.add_disk(ZONES[1], "boot", {})
        disk["sourceImage"] = f"https://www.googleapis.com/compute/v1/{made.image}"
        [image] = await deferToThread(self.publisher("family/other").images)
        self.assertEqual(image.used_by, f"disk boot in {ZONES[1]} is of it")


class ProviderTests(GcpCase, Publishing):
    """A node's provider uses published images, with the node's own role."""

    def setUp(self) -> object:
        result = super().setUp()
        self.begin()
        return result

    async def clean_up(self) -> None:
        self.world.role = gce_permissions.ROLE
        await super().clean_up()

    async def finish(self) -> None:
        await self.end()
        await super().finish()

    async def test_it_launches_pods_and_finds_the_images_that_are_pods(self) -> None:
        made = await self.publish()
        web = await self.publish(Publication(self.publication.disk, ImageLabel("machine", "team/web:1.0")))
        self.world.role = gce_permissions.ROLE
        self.settings["image"] = made.image
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        found = await self.within(provider.catalogue.find("team/web:1.0", {}))
        self.assertEqual(found.machine, web.image)
        await self.within(provider.launch(self.spec()))
        [seen] = self.world.seen()
        self.assertEqual(seen.image, made.image)


class ResumableTests(SynchronousTestCase):
    """The protocol of uploads, without I/O."""

    def test_parts_follow_what_is_kept(self) -> None:
        upload = ResumableUpload(40 << 20)
        self.assertEqual(upload.headers(), {"Content-Range": "bytes 0-16777215/41943040"})
        self.assertIs(upload.answered(308, {"Range": "bytes=0-16777215"}), Outcome.GO_ON)
        self.assertEqual(upload.headers(), {"Content-Range": "bytes 16777216-33554431/41943040"})
        upload.answered(308, {"Range": "bytes=0-999"})
        self.assertEqual(upload.next_range(), (1000, 16 << 20))
        upload.answered(308, {})
        self.assertEqual(upload.next_range(), (0, 16 << 20))
        self.assertIs(upload.answered(200, {}), Outcome.DONE)

    def test_other_answers(self) -> None:
        upload = ResumableUpload(10)
        self.assertEqual(upload.question()["Content-Range"], "bytes */10")
        for status, outcome in (
            (404, Outcome.GONE),
            (410, Outcome.GONE),
            (503, Outcome.AGAIN),
            (429, Outcome.AGAIN),
            (403, Outcome.REFUSED),
        ):
            self.assertIs(upload.answered(status, {}), outcome)
