# SPDX-License-Identifier: Apache-2.0
"""Images of machines' disks, made and looked at by `infranetes-guest image`."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import cli
from infranetes.guest.machine_images import Seen, ToBuild, build_image, inspect_file, inspect_reference
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from tests.harness.needs import needs_programs
from tests.infranetes.images.machine import builders
from tests.infranetes.images.machine.builders import MIB
from tests.infranetes.images.machine.support import MachineCase
from tests.infranetes.images.support import reactor


@needs_programs("skopeo", "docker-registry", "qemu-img")
class ImageTests(MachineCase):
    async def begin(self) -> None:
        await super().begin()
        self.disk = Path(self.mktemp()).absolute().with_name("debian.qcow2")
        self.addCleanup(self.disk.unlink, True)
        self.disk.write_bytes(self.qcow2(builders.gpt_disk(builders.fat(), code=True)))
        self.name = self.registry.reference("vm", "1")

    async def test_an_image_that_is_pushed_is_one_that_the_node_boots(self) -> None:
        wanted = ToBuild(self.disk, self.name, agent=True, push=True, insecure=True)
        built = await build_image(reactor, wanted, self.told.append)
        image = await self.store.pull(self.name)
        self.assertEqual(image.repo_digests, (f"{self.registry.host}/vm@{built.digest}",))
        base = await self.machine.base(image)
        self.assertEqual(base.path.read_bytes(), self.disk.read_bytes())
        self.assertTrue(base.has_agent and base.boots_by_bios and base.boots_by_uefi)
        config = json.loads(await self.store.config(image.id))
        self.assertEqual(config["config"], {"Labels": {"io.infranetes.agent": "true"}})

    async def test_an_artifact_is_the_disk_and_takes_no_further_room_on_the_node(self) -> None:
        wanted = ToBuild(self.disk, self.name, agent=True, artifact=True, push=True, insecure=True)
        built = await build_image(reactor, wanted, self.told.append)
        image = await self.store.pull(self.name)
        self.assertEqual(image.id, built.digest)
        base = await self.machine.base(image)
        self.assertTrue(base.has_agent and base.boots_by_bios)
        self.assertTrue(base.path.samefile(self.store.files(image.id).layers[0].path))

    async def test_the_same_disk_gives_the_same_image(self) -> None:
        digests = []
        for number in range(2):
            output = Path(self.mktemp())
            wanted = ToBuild(self.disk, f"vm:{number}", output=output)
            built = await build_image(reactor, wanted, self.told.append)
            digests.append(built.digest)
        self.assertEqual(*digests)

    async def test_an_archive_is_one_that_skopeo_takes(self) -> None:
        archive = Path(self.mktemp()).absolute()
        await build_image(reactor, ToBuild(self.disk, "vm:1", output=archive), self.told.append)
        target = Path(self.mktemp()).absolute()
        words = ["skopeo", "--insecure-policy", "copy", "--quiet"]
        subprocess.run([*words, f"oci-archive:{archive}:1", f"dir:{target}"], check=True)
        manifest = json.loads((target / "manifest.json").read_bytes())
        layer = target / manifest["layers"][0]["digest"].removeprefix("sha256:")
        with tarfile.open(layer) as tar:
            self.assertEqual(tar.getnames(), ["disk", "disk/debian.qcow2"])
        self.assertEqual([each for each in os.listdir(archive.parent) if each.startswith(".")], [])

    async def test_a_disk_that_can_not_be_booted_is_not_made_an_image(self) -> None:
        self.disk.write_bytes(b"KDMV" + bytes(3000))
        output = Path(self.mktemp())
        wanted = ToBuild(self.disk, "vm:1", output=output)
        words = await self.fails(FailedPrecondition, build_image(reactor, wanted, self.told.append))
        self.assertIn("-f vmdk", words)
        self.assertFalse(output.exists())

    async def test_a_name_that_is_none_or_a_registry_that_is_down_is_said(self) -> None:
        for tag in ("VM", f"vm@sha256:{'0' * 64}"):
            await self.fails(InvalidArgument, build_image(reactor, ToBuild(self.disk, tag), self.told.append))
        self.registry.stop_process()
        wanted = ToBuild(self.disk, self.name, push=True, insecure=True)
        await self.fails(Unavailable, build_image(reactor, wanted, self.told.append))

    async def test_a_disk_for_another_machine_is_an_image_for_it(self) -> None:
        self.disk.write_bytes(self.qcow2(builders.gpt_disk(builders.fat(["BOOTAA64.EFI"]))))
        for artifact in (False, True):
            wanted = ToBuild(self.disk, self.name, artifact=artifact, push=True, insecure=True)
            await build_image(reactor, wanted, self.told.append)
            words = await self.fails(FailedPrecondition, self.store.pull(self.name))
            self.assertIn("/arm64", words)

    async def test_a_file_is_inspected_also_a_compressed_one(self) -> None:
        seen = Seen("qcow2", 64 * MIB, True, True, False, ("amd64",))
        self.assertEqual(await inspect_file(reactor, self.disk), seen)
        packed = Path(self.mktemp())
        packed.write_bytes(gzip.compress(self.disk.read_bytes()))
        self.assertEqual(await inspect_file(reactor, packed), seen)

    async def test_a_file_that_only_its_owner_can_read_is_inspected(self) -> None:
        self.disk.chmod(0o600)
        self.assertEqual((await inspect_file(reactor, self.disk)).virtual_size, 64 * MIB)

    async def test_an_image_in_a_registry_is_inspected(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.disk.read_bytes()})
        seen = await inspect_reference(reactor, image.repo_tags[0], True, "", self.told.append)
        digest = image.repo_digests[0].rpartition("@")[2]
        self.assertEqual(seen, Seen("qcow2", 64 * MIB, True, True, digest=digest))
        missing = self.registry.reference("none", "1")
        await self.fails(NotFound, inspect_reference(reactor, missing, True, "", self.told.append))


@needs_programs("qemu-img")
class CommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.disk = self.directory / "disk.qcow2"
        builders.qcow2(self.disk, builders.mbr())

    def run_(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "infranetes.guest.cli", "image", *words]
        return subprocess.run(command, cwd=self.directory, capture_output=True, text=True)

    def test_build_and_inspect_print_what_they_made_and_saw(self) -> None:
        made = self.run_("build", "disk.qcow2", "--tag", "team/vm:1", "--json")
        self.assertEqual((made.returncode, made.stderr), (0, ""))
        document = json.loads(made.stdout)
        self.assertEqual(document["image"], "docker.io/team/vm:1")
        self.assertEqual(document["archive"], "disk.qcow2.oci.tar")
        self.assertTrue((self.directory / "disk.qcow2.oci.tar").is_file())
        seen = self.run_("inspect", "disk.qcow2")
        self.assertIn("by BIOS", seen.stdout)
        self.assertIn("67108864 bytes", seen.stdout)

    def test_what_fails_says_why_in_one_line(self) -> None:
        bad = self.directory / "bad"
        bad.write_bytes(b"")
        for words in (["inspect", "./none"], ["build", "bad", "--tag", "x"]):
            ended = self.run_(*words)
            self.assertEqual(ended.returncode, 1)
            self.assertRegex(ended.stderr, r"^infranetes-guest: [^\n]+\n$")

    def test_both_are_told_by_the_help(self) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertRaises(SystemExit, cli.main, ["image", "--help"])
        self.assertIn("build", out.getvalue())
        self.assertIn("inspect", out.getvalue())
