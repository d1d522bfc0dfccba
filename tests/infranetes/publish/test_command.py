# SPDX-License-Identifier: Apache-2.0
"""`infranetes-guest publish` and `images`, as processes that are killed, and as calls."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import image
from infranetes.guest.image import GuestImage
from infranetes.publish import command
from infranetes.publish.command import choose
from infranetes.publish.interface import CloudImage, Publication, Published, Report
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from tests.harness.durations import slow
from tests.infranetes.publish import disks
from tests.infranetes.publish.test_aws import PublishCase
from tests.support.clouds import moto

DAY = 86400.0


class CommandTests(PublishCase):
    """The executable, on a simulated AWS."""

    def setUp(self) -> None:
        super().setUp()
        table = self.world.table()
        del table["image"]  # since it does not exist yet
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        self.config = self.disk.with_name("infranetes.toml")
        self.config.write_text("[providers.aws]\n" + "\n".join(lines) + "\n")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "infranetes.publish.command", *arguments, "--config", str(self.config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
        )
        self.processes.append(process)
        return process

    def publishing(self) -> subprocess.Popen[bytes]:
        endpoint = ("--ebs-endpoint", self.ebs.endpoint)
        return self.start("publish", "aws", "--disk", str(self.disk), "--json", *endpoint)

    @slow(9, "three processes import the cloud's library")
    async def test_a_killed_process_is_gone_on_with_and_its_image_removed_on_request(self) -> None:
        killed = self.publishing()

        def kill(request: str) -> None:
            if request == "PutSnapshotBlock":
                killed.send_signal(signal.SIGKILL)

        self.ebs.after = kill
        await deferToThread(killed.communicate)
        self.assertEqual(killed.returncode, -signal.SIGKILL)
        self.ebs.after = lambda request: None
        process = self.publishing()
        out, err = await deferToThread(process.communicate)
        self.assertEqual(process.returncode, 0, err)
        made = json.loads(out)
        self.assertEqual(self.images(), [made["image"]])
        self.assertEqual(made["settings"], {"image": made["image"]})
        self.assertEqual(len(self.ebs.snapshots()), 1)
        self.assertIn(b"100 %", err)
        self.assertNotIn(moto.KEYS[1].encode(), out + err)
        process = self.start("images", "aws", "--json", "--remove", made["image"])
        out, err = await deferToThread(process.communicate)
        self.assertEqual(json.loads(out), {"images": [], "removed": [made["image"]]}, err)
        self.assertEqual((self.images(), self.ebs.snapshots()), ([], []))


class ArgumentTests(SynchronousTestCase):
    """Mistakes that can be detected without a cloud."""

    def fails(self, *arguments: str) -> str:
        said = io.StringIO()
        self.patch(sys, "stderr", said)
        self.assertEqual(command.main(arguments), 1)
        return said.getvalue()

    def test_without_a_table_of_the_cloud_it_says_which_is_missing(self) -> None:
        path = Path(self.mktemp())
        path.write_text('provider = "qemu"\n')
        said = self.fails("publish", "aws", "--config", str(path))
        self.assertIn(f"{path}: there is no table [providers.aws]", said)

    def test_wrong_keys_are_named(self) -> None:
        path = Path(self.mktemp())
        path.write_text('[providers.aws]\nregion = "nowhere"\n')
        self.assertIn("providers.aws.region", self.fails("images", "aws", "--config", str(path)))

    def test_a_profile_that_does_not_exist_is_named(self) -> None:
        path = Path(self.mktemp())
        path.write_text('[providers.aws]\nregion = "eu-west-1"\nprofile = "publisher"\n')
        said = self.fails("images", "aws", "--config", str(path))
        self.assertIn("publisher", said)
        self.assertIn("look at the credentials", said)

    def test_a_name_goes_with_images_that_are_pods(self) -> None:
        self.assertIn("--kind machine", self.fails("publish", "aws", "--name", "web:1.0"))
        self.assertIn("NAME:VERSION", self.fails("publish", "aws", "--kind", "machine"))


class OwnDiskTests(SynchronousTestCase):
    """A disk that the command itself makes from the guest image."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.guest = GuestImage(self.directory, "key", 1.0, "bookworm", "6.1", ())
        self.made: list[Path] = []
        self.published: list[Publication] = []
        self.fails = False
        self.patch(image, "current", lambda directory: self.guest)
        self.patch(command, "build_cloud_disk", self.build)
        self.patch(command, "_publisher", lambda options: self)
        self.patch(sys, "stderr", io.StringIO())
        self.patch(sys, "stdout", io.StringIO())

    def build(self, source: str, kind: str, target: Path, gib: int, report: Report, **_: object) -> None:
        self.assertEqual((source, kind, gib), ("aws", "oci", 3))
        disks.make(target, {2: b"x"}, 4 << 20)
        self.made.append(target)

    def publish(self, publication: Publication, report: Report) -> Published:
        self.published.append(publication)
        if self.fails:
            raise Unavailable("the cloud is away")
        return Published("aws", "ami-1", publication.title, "", {"image": "ami-1"})

    def close(self) -> None:
        """Do nothing."""

    def run_command(self) -> int:
        directory = str(self.directory)
        return command.main(["publish", "aws", "--kind", "oci", "--size", "3", "--image-dir", directory])

    def test_it_is_kept_until_it_is_published(self) -> None:
        self.fails = True
        self.assertEqual(self.run_command(), 1)
        [disk] = self.made
        self.assertTrue(disk.exists())
        self.fails = False
        self.assertEqual(self.run_command(), 0)
        self.assertEqual(self.made, [disk])
        self.assertEqual([each.disk.path for each in self.published], [disk, disk])
        self.assertFalse(disk.exists())

    def test_what_nobody_has_gone_on_with_for_a_day_is_removed(self) -> None:
        self.fails = True
        self.run_command()
        self.guest = attrs.evolve(self.guest, key="newer")
        self.run_command()
        [old, new] = self.made
        self.assertTrue(old.exists())
        os.utime(old, (0, 0))
        self.run_command()
        self.assertEqual((old.exists(), new.exists()), (False, True))

    def test_that_of_another_guest_image_is_not_published(self) -> None:
        self.fails = True
        self.run_command()
        self.guest = attrs.evolve(self.guest, key="newer")
        self.run_command()
        self.assertEqual(len(set(self.made)), 2)


def _image(id: str, days: float, kind: str = "docker", name: str = "", used_by: str = "") -> CloudImage:
    return CloudImage(id, id, kind, name, 1000 * DAY - days * DAY, used_by=used_by)


class ChooseTests(SynchronousTestCase):
    """Which images are removed."""

    images = (
        _image("new", 1),
        _image("used", 10, used_by="instance i-1 uses it"),
        _image("old", 20),
        _image("web", 30, "machine", "web:1.0"),
    )

    def chosen(
        self, ids: tuple[str, ...] = (), days: int | None = None, keep: int | None = None
    ) -> list[str]:
        return [each.id for each in choose(self.images, ids, days, keep, 1000 * DAY)]

    def test_none_without_being_asked(self) -> None:
        self.assertEqual(self.chosen(), [])

    def test_by_age_but_for_those_in_use(self) -> None:
        self.assertEqual(self.chosen(days=5), ["old", "web"])
        self.assertEqual(self.chosen(days=25), ["web"])

    def test_all_but_the_newest_of_each_kind_and_name(self) -> None:
        self.assertEqual(self.chosen(keep=1), ["old"])
        self.assertEqual(self.chosen(keep=3), [])

    def test_by_id_unless_it_is_in_use_or_unknown(self) -> None:
        self.assertEqual(self.chosen(("web", "web")), ["web"])
        self.assertRaises(FailedPrecondition, self.chosen, ("web", "used"))
        self.assertRaises(NotFound, self.chosen, ("foreign",))
