# SPDX-License-Identifier: Apache-2.0
"""The node's own catalogue: disks by URL, and files of the node."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.images import Image, ImagesConfig
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.interface import IKeepsImages
from infranetes.images.machine import download
from infranetes.images.machine.catalogue import MachineCatalogue
from infranetes.images.machine.config import MachineImageConfig
from infranetes.images.machine.disk import DiskFormat
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.images.machine import builders
from tests.infranetes.images.machine.builders import MIB
from tests.infranetes.images.machine.disk_server import DiskServer
from tests.infranetes.images.support import reactor
from tests.support.file_systems import mounted
from tests.support.waiting import until

NAME = "qemu.infranetes.io/debian:12"
DISK = builders.mbr() + random.Random(1).randbytes(3 * MIB)  # noqa: S311


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class CatalogueCase(TestCase):
    """A store of the catalogue's images, and a server of disks."""

    directory: Path

    async def setUp(self) -> None:
        self.patch(download, "RETRY_SECONDS", (0.001, 0.001))
        self.directory = Path(self.mktemp()).absolute() / "images-qemu"
        self.server = DiskServer(DISK)
        self.url = self.server.start(reactor)
        self.addCleanup(self.server.stop)
        self.stores: list[CatalogueStore] = []

    async def tearDown(self) -> None:
        for store in self.stores:
            await store.stop()

    async def new(
        self, images: Mapping[str, MachineImageConfig] | None = None, **config: Any
    ) -> CatalogueStore:
        if images is None:
            images = {"debian:12": MachineImageConfig(url=self.url, sha256=sha256(self.server.content))}
        config.setdefault("stall_seconds", 5.0)
        self.catalogue = MachineCatalogue(
            reactor, self.directory / "machines", images, ImagesConfig(**config), trust=self.server.trust
        )
        store = CatalogueStore(reactor, self.directory, self.catalogue)
        self.stores.append(store)
        await store.start()
        return store

    async def pulled(self, store: CatalogueStore, name: str = NAME) -> Image:
        return await store.pull(name, {})

    async def fails(self, kind: type[Exception], store: CatalogueStore, name: str = NAME) -> str:
        """Return why a pull fails, of which nothing may be left."""
        error: Any = await self.assertFailure(start(store.pull(name, {})), kind)
        self.assert_nothing_left()
        self.assertEqual(store.list(), [])
        return str(error)

    def files(self) -> set[str]:
        return set(os.listdir(self.directory / "machines")) - {"bases.json", "new"}

    def assert_nothing_left(self) -> None:
        self.assertEqual(self.files(), set())
        self.assertEqual(os.listdir(self.directory / "machines" / "new"), [])


class UrlTests(CatalogueCase):
    async def test_it_keeps_the_interface(self) -> None:
        await self.new()
        verifyObject(IKeepsImages, self.catalogue)

    async def test_a_pull_brings_the_disk_to_the_node(self) -> None:
        store = await self.new()
        image = await self.pulled(store)
        self.assertEqual(image.id, f"sha256:{sha256(DISK)}")
        self.assertEqual((image.repo_tags, image.machine), ((NAME,), image.id))
        self.assertEqual(image.repo_digests, (f"qemu.infranetes.io/debian@{image.id}",))
        self.assertEqual(image.size, len(DISK))
        base = await self.catalogue.base(image.id)
        self.assertEqual((base.format, base.boots_by_bios), (DiskFormat.RAW, True))
        self.assertEqual(base.path.read_bytes(), DISK)
        self.assertGreater((await store.fs_usage()).used_bytes, len(DISK))

    async def test_it_is_downloaded_once_and_found_by_the_next_daemon(self) -> None:
        store = await self.new()
        images = [await self.pulled(store), await self.pulled(store), await self.pulled(await self.new())]
        self.assertEqual(len(set(images)), 1)
        self.assertEqual(len(self.server.ranges), 1)

    async def test_equal_pulls_share_a_download(self) -> None:
        store = await self.new()
        pulls = [start(self.pulled(store)) for _ in range(3)]
        self.assertEqual(len({await each for each in pulls}), 1)
        self.assertEqual(len(self.server.ranges), 1)

    async def test_one_that_breaks_off_is_continued(self) -> None:
        self.server.breaks = [MIB, MIB // 2, 0, 10]
        image = await self.pulled(await self.new())
        self.assertEqual((await self.catalogue.base(image.id)).path.read_bytes(), DISK)
        offsets = [int(each.removeprefix("bytes=")[:-1] or 0) for each in self.server.ranges if each]
        self.assertEqual(offsets[0], MIB)
        self.assertEqual(offsets, sorted(offsets))

    async def test_one_that_breaks_off_again_and_again_is_given_up(self) -> None:
        self.server.breaks = [100] + [0] * 20
        words = await self.fails(Unavailable, await self.new(attempts=3))
        self.assertIn("broke off", words)
        self.assertEqual(len(self.server.ranges), 3)

    async def test_a_content_that_changed_meanwhile_is_fetched_from_its_beginning(self) -> None:
        """Also from a server that takes no ranges."""
        for honours, tag in ((True, '"2"'), (False, '"1"')):
            self.server.breaks, self.server.ranges, self.server.tag = [1000], [], '"1"'
            store = await self.new()
            pulling = start(self.pulled(store))
            await until(lambda: not self.server.breaks, "it has broken off")
            self.server.tag, self.server.honours = tag, honours
            image = await pulling
            self.assertEqual((await self.catalogue.base(image.id)).path.read_bytes(), DISK)
            self.assertEqual(self.server.ranges, ["", "bytes=1000-"])
            await store.remove(NAME)

    async def test_another_part_than_was_asked_for_is_not_taken(self) -> None:
        self.server.breaks, self.server.shift = [1000], 1
        image = await self.pulled(await self.new())
        self.assertEqual((await self.catalogue.base(image.id)).path.read_bytes(), DISK)

    async def test_a_part_behind_the_end_begins_it_anew(self) -> None:
        self.server.breaks, self.server.shift = [1000], 1 << 40
        await self.pulled(await self.new())

    async def test_another_checksum_is_refused_and_nothing_kept(self) -> None:
        store = await self.new({"debian:12": MachineImageConfig(url=self.url, sha256="0" * 64)})
        words = await self.fails(FailedPrecondition, store)
        self.assertIn(sha256(DISK), words)
        self.assertIn("which of them is right", words)

    async def test_a_file_that_is_too_large_is_refused_whether_it_says_so_or_not(self) -> None:
        for said in (None, 0):
            self.server.said = said
            self.assertIn(
                "max_layer_bytes", await self.fails(FailedPrecondition, await self.new(max_layer_bytes=MIB))
            )

    async def test_one_whose_length_is_not_said_is_taken_by_its_checksum(self) -> None:
        self.server.said = 0
        await self.pulled(await self.new())

    async def test_what_the_server_says_is_told(self) -> None:
        for status, kind in (
            (404, NotFound),
            (403, PermissionDenied),
            (503, Unavailable),
            (429, Unavailable),
            (400, FailedPrecondition),
        ):
            self.server.status = status
            self.assertIn(f"HTTP {status}", await self.fails(kind, await self.new(attempts=1)))

    async def test_a_server_that_says_nothing_more_is_given_up(self) -> None:
        self.server.silent = True
        words = await self.fails(Unavailable, await self.new(stall_seconds=1.0, attempts=1))
        self.assertIn("sent nothing for 1 s", words)

    async def test_a_certificate_that_is_not_trusted_is_refused(self) -> None:
        self.server.trust = DiskServer(b"").trust
        words = await self.fails(FailedPrecondition, await self.new())
        self.assertIn("certificate is not trusted", words)

    async def test_a_server_that_is_not_there_is_unavailable(self) -> None:
        await self.server.stop()
        self.assertIn("can't be reached", await self.fails(Unavailable, await self.new(attempts=1)))

    async def test_a_redirect_to_the_same_server_is_followed(self) -> None:
        self.server.redirects = {"/disk.qcow2": "/a", "/a": self.server.url("b")}
        await self.pulled(await self.new())

    async def test_redirects_lead_to_https_alone_and_not_in_a_circle(self) -> None:
        for target, words in (
            ("http://example.org/x", "redirects to 'http'"),
            ("file:///etc/shadow", "to no address"),
            ("ftp://example.org/", "redirects to 'ftp'"),
            ("https://user:password@example.org/", "to no address"),
            ("", "to no address"),
            ("/disk.qcow2", "too often"),
        ):
            self.server.redirects = {"/disk.qcow2": target}
            said = await self.fails(FailedPrecondition, await self.new())
            self.assertIn(words, said)
            self.assertNotIn("password", said)

    async def test_redirects_to_this_machine_or_metadata_are_refused(self) -> None:
        other = DiskServer(DISK)
        self.addCleanup(other.stop)
        other.start(reactor)
        for target in (
            other.url("x"),
            other.url("x").replace("127.0.0.1", "localhost"),
            "https://169.254.169.254/latest/meta-data/",
            "https://[::1]/",
            "https://[::ffff:169.254.169.254]/",
        ):
            self.server.redirects = {"/disk.qcow2": target}
            self.assertIn("this machine", await self.fails(FailedPrecondition, await self.new()), target)
        self.assertEqual(other.ranges, [])

    async def test_a_pull_that_nobody_waits_for_any_more_leaves_nothing(self) -> None:
        self.server.silent = True
        store = await self.new()
        pulls = [start(self.pulled(store)) for _ in range(2)]
        await until(lambda: bool(self.server.ranges), "it is asked for")
        for pull in pulls:
            pull.cancel()
            await self.assertFailure(pull, CancelledError)
        self.assert_nothing_left()

    async def test_a_stop_ends_it_and_leaves_nothing(self) -> None:
        self.server.silent = True
        store = await self.new()
        pull = start(self.pulled(store))
        await until(lambda: bool(self.server.ranges), "it is asked for")
        await store.stop()
        await self.assertFailure(pull, Unavailable)
        self.assertIn("stopping", await self.fails(Unavailable, store))

    async def test_a_disk_that_can_not_be_used_is_refused_by_the_pull(self) -> None:
        self.server.content = b"KDMV" + bytes(4000)
        self.assertIn("-f vmdk", await self.fails(FailedPrecondition, await self.new()))

    @needs_programs("qemu-img")
    async def test_a_compressed_qcow2_becomes_what_it_is(self) -> None:
        disk = builders.qcow2(Path(self.mktemp()), builders.mbr())
        self.server.content = gzip.compress(disk)
        image = await self.pulled(await self.new())
        base = await self.catalogue.base(image.id)
        self.assertEqual((base.format, base.path.read_bytes()), (DiskFormat.QCOW2, disk))
        self.assertEqual(base.digest, f"sha256:{sha256(self.server.content)}")

    async def test_what_a_killed_daemon_left_is_removed_at_the_start(self) -> None:
        await self.new()
        (self.directory / "machines" / "new" / "half").write_bytes(b"half")
        (self.directory / "machines" / ("0" * 64 + ".raw")).write_bytes(b"not in the index")
        await self.new()
        self.assert_nothing_left()


class NameTests(CatalogueCase):
    async def test_what_is_not_configured_is_not_found_and_what_is_there_is_told(self) -> None:
        store = await self.new()
        for name in ("qemu.infranetes.io/debian:13", "qemu.infranetes.io/windows"):
            self.assertIn("there is debian:12", await self.fails(NotFound, store, name))

    async def test_a_name_without_the_domain_is_none_of_these(self) -> None:
        store = await self.new()
        self.assertIn("qemu.infranetes.io/NAME", await self.fails(InvalidArgument, store, "debian:12"))

    async def test_a_digest_means_that_file(self) -> None:
        store = await self.new()
        digest = f"sha256:{sha256(DISK)}"
        image = await self.pulled(store, f"qemu.infranetes.io/debian@{digest}")
        self.assertEqual(image.id, digest)
        self.assertEqual(store.resolve(f"qemu.infranetes.io/debian@{digest}"), image)
        await store.remove(NAME)
        await self.fails(NotFound, store, f"qemu.infranetes.io/debian@sha256:{'0' * 64}")

    async def test_an_image_goes_with_its_disk_and_not_while_it_is_held(self) -> None:
        store = await self.new()
        image = await self.pulled(store)
        async with store.held(image.id):
            await store.remove(NAME)
            self.assertEqual(len(self.files()), 1)
        self.assert_nothing_left()
        await self.assertFailure(start(self.catalogue.base(image.id)), NotFound)

    async def test_an_image_whose_disk_is_gone_is_forgotten_and_pulled_again(self) -> None:
        store = await self.new()
        image = await self.pulled(store)
        (await self.catalogue.base(image.id)).path.unlink()
        await store.check(image.id)
        self.assertEqual(store.list(), [])
        self.assertEqual(await self.pulled(store), image)

    async def test_another_format_of_the_same_file_is_another_image(self) -> None:
        config = MachineImageConfig(url=self.url, sha256=sha256(DISK))
        agent = MachineImageConfig(url=self.url, sha256=sha256(DISK), format="raw", agent=True)
        store = await self.new({"a:1": config, "b:1": agent})
        images = [await self.pulled(store, f"qemu.infranetes.io/{name}:1") for name in "ab"]
        bases = [await self.catalogue.base(image.id) for image in images]
        self.assertEqual([base.has_agent for base in bases], [False, True])
        self.assertEqual(bases[0].path, bases[1].path)

    async def test_the_format_that_is_configured_counts(self) -> None:
        """A guest may have written the mark of another one."""
        self.server.content = b"QFI\xfb" + bytes(2000)
        config = MachineImageConfig(url=self.url, sha256=sha256(self.server.content), format="raw")
        image = await self.pulled(await self.new({"debian:12": config}))
        self.assertEqual((await self.catalogue.base(image.id)).format, DiskFormat.RAW)

    async def test_a_changed_configuration_counts_from_the_next_pull_on(self) -> None:
        store = await self.new()
        self.catalogue.reconfigure({}, ImagesConfig())
        await self.fails(NotFound, store)


class FileTests(CatalogueCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.file = Path(self.mktemp()).absolute()
        self.file.write_bytes(DISK)

    async def lending(self, **options: Any) -> CatalogueStore:
        return await self.new({"debian:12": MachineImageConfig(path=str(self.file), **options)})

    async def test_a_file_of_the_node_is_copied_so_that_its_owner_may_change_it(self) -> None:
        image = await self.pulled(await self.lending())
        base = await self.catalogue.base(image.id)
        self.assertFalse(base.path.samefile(self.file))
        self.assertEqual((image.id, base.digest), (f"sha256:{sha256(DISK)}",) * 2)
        self.file.write_bytes(b"changed")
        self.assertEqual(base.path.read_bytes(), DISK)

    async def test_it_is_copied_once_and_again_when_it_has_changed(self) -> None:
        store = await self.lending()
        first = await self.pulled(store)
        inode = (await self.catalogue.base(first.id)).path.stat().st_ino
        store = await self.lending()
        self.assertEqual(await self.pulled(store), first)
        self.assertEqual((await self.catalogue.base(first.id)).path.stat().st_ino, inode)
        self.file.write_bytes(DISK + bytes(MIB))
        second = await self.pulled(store)
        self.assertNotEqual(first.id, second.id)
        self.assertEqual(store.resolve(NAME), second)

    async def test_a_checksum_is_held_to(self) -> None:
        await self.pulled(await self.lending(sha256=sha256(DISK)))
        await self.stores[-1].remove(NAME)
        words = await self.fails(FailedPrecondition, await self.lending(sha256="0" * 64))
        self.assertIn(sha256(DISK), words)

    async def test_what_is_missing_or_no_file_is_said(self) -> None:
        self.file.unlink()
        self.assertIn("is not there", await self.fails(FailedPrecondition, await self.lending()))
        self.file.mkdir()
        self.assertIn("is no file", await self.fails(FailedPrecondition, await self.lending()))


@needs_mounts
class FullDiskTests(CatalogueCase):
    async def test_it_is_said_and_nothing_is_left(self) -> None:
        self.directory = mounted(self, "tmpfs", 2 * MIB) / "images-qemu"
        store = await self.new()
        for said in (None, 0):  # the length, by which it is known before
            self.server.said = said
            self.assertIn("full", await self.fails(ResourceExhausted, store))
        self.server.said = None
        self.server.content = DISK[:MIB]
        await self.pulled(await self.new())

    async def test_a_copy_of_a_file_that_has_no_room_is_said_and_nothing_is_left(self) -> None:
        lent = Path(self.mktemp()).absolute()
        lent.write_bytes(DISK)
        self.directory = mounted(self, "tmpfs", 2 * MIB) / "images-qemu"
        store = await self.new({"debian:12": MachineImageConfig(path=str(lent))})
        self.assertIn("make room", await self.fails(ResourceExhausted, store))
