# SPDX-License-Identifier: Apache-2.0
"""Making an image in the child: what the child may do, and what is left when it fails."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import zstandard
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from infranetes.images.erofs import process
from infranetes.images.erofs.build import Builder, BuiltLayer
from infranetes.images.erofs.limits import Limits
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, ResourceExhausted
from infranetes_common.reactors import installed
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.images.erofs.support import converted, digest, member, mounted, tar
from tests.support.waiting import until

reactor = installed()
TAR = tar([member("d/f", content=b"content" * 1000, mtime=5), member("e", content=b"small")])


class BuildCase(TestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.target = self.directory / "image"
        self.builder = Builder(reactor)
        self.addCleanup(lambda: start(self.builder.stop()))

    def layer(self, data: bytes) -> Path:
        path = Path(self.mktemp()).absolute()
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    def build(
        self, data: bytes, compression: str = "", diff_id: str = digest(TAR), limits: Limits | None = None
    ) -> Deferred[BuiltLayer]:
        layer = self.layer(data)
        return start(self.builder.build(layer, compression, self.target, diff_id, limits or Limits(), ()))

    async def failure(self, kind: type[Exception], work: Deferred[BuiltLayer]) -> str:
        """Return the message with which `work` fails."""
        failed: Deferred[Any] = work  # Any: assertFailure makes it one of the error
        error: Exception = await self.assertFailure(failed, kind)
        return str(error)

    async def refused(self, kind: type[Exception], work: Deferred[BuiltLayer]) -> str:
        """Return the message with which `work` fails. Check that it has left nothing."""
        said = await self.failure(kind, work)
        self.assertEqual(os.listdir(self.directory), [])
        return said


class BuildTests(BuildCase):
    @needs_mounts
    @deferred
    async def test_the_image_is_the_same_however_the_layer_is_compressed(self) -> None:
        expected = converted(TAR, Path(self.mktemp()))
        frames = zstandard.compress(TAR[:5000]) + zstandard.compress(TAR[5000:])
        members = gzip.compress(TAR[:5000]) + gzip.compress(TAR[5000:]) + bytes(100)
        for compression, data in (("", TAR), ("gzip", members), ("zstd", frames)):
            built = await self.build(data, compression)
            self.assertEqual(self.target.read_bytes(), expected)
            self.assertEqual(built, BuiltLayer(len(expected), digest(expected)))
            self.assertEqual(os.listdir(self.directory), ["image"])
        with mounted(self.target) as at:
            self.assertEqual((at / "d" / "f").read_bytes(), b"content" * 1000)

    @deferred
    async def test_a_daemon_whose_files_an_upgrade_has_replaced_is_served(self) -> None:
        """Orders of the release before don't say whether the layers below are known."""
        say = process._Process.say

        def say_as_before(self: process._Process, message: dict[str, object], *descriptors: int) -> None:
            message.pop("below", None)
            say(self, message, *descriptors)

        self.patch(process._Process, "say", say_as_before)
        layer = tar([member("e", content=b"small")])
        await self.build(layer, diff_id=digest(layer))
        self.assertTrue(self.target.exists())

    @deferred
    async def test_a_layer_with_another_digest_is_refused(self) -> None:
        other = digest(b"other")
        said = await self.refused(FailedPrecondition, self.build(TAR, diff_id=other))
        self.assertIn(f"layer {other} can't be used: it unpacks to a tar with the digest", said)
        self.assertIn(digest(TAR), said)

    @deferred
    async def test_what_is_no_tar_or_compressed_in_another_way_is_refused(self) -> None:
        packed = gzip.compress(TAR)
        for data, compression, why in (
            (b"\1" * 10000, "", "no header at byte 0"),
            (TAR, "gzip", "not the gzip file"),
            (TAR, "zstd", "not the zstd file"),
            (packed[:-30], "gzip", "cut off"),
            (packed[:-5] + b"abcde", "gzip", "not the gzip file"),
            (packed, "", "its tar"),
            (TAR[:2000], "", "cut off"),
            (b"", "gzip", "digest"),
        ):
            said = await self.refused(FailedPrecondition, self.build(data, compression))
            self.assertIn(why, said)

    @deferred
    async def test_what_unpacks_to_more_than_may_be_is_not_unpacked(self) -> None:
        limits = Limits(max_bytes=4 << 20)
        end = tar([])
        large, _content = member("large", size=64 << 20)
        for bomb in (large.tobuf(tarfile.USTAR_FORMAT) + bytes(64 << 20), end + bytes(64 << 20)):
            for compression, data in (("gzip", gzip.compress(bomb, 1)), ("zstd", zstandard.compress(bomb))):
                work = self.build(data, compression, limits=limits)
                self.assertIn("images.max_layer_bytes", await self.refused(FailedPrecondition, work))
        parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        work = self.build(packer.compress(TAR) + packer.flush(), "zstd", limits=limits)
        self.assertIn("zstd file", await self.refused(FailedPrecondition, work))

    @needs_mounts
    @deferred
    async def test_a_full_disk_leaves_nothing_and_says_so(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", self.directory], check=True)
        try:
            large = tar([member("large", content=bytes(1 << 20))])
            said = await self.refused(ResourceExhausted, self.build(large, diff_id=digest(large)))
            self.assertIn("there is no room for the disk of layer", said)
        finally:
            subprocess.run(["umount", self.directory], check=True)

    @deferred
    async def test_what_a_killed_daemon_left_is_no_obstacle(self) -> None:
        (self.directory / "image.part").write_bytes(b"left")
        await self.build(TAR)
        self.assertEqual(os.listdir(self.directory), ["image"])


class WorkingCase(BuildCase):
    """Layers without an end, so that a child works until it is killed."""

    def endless(self) -> Path:
        layer = Path(self.mktemp()).absolute()
        os.mkfifo(layer)
        self.addCleanup(os.close, os.open(layer, os.O_RDWR))
        return layer

    def begin(self, layer: Path, target: str, limits: Limits | None = None) -> Deferred[BuiltLayer]:
        work = self.builder.build(layer, "", self.directory / target, digest(TAR), limits or Limits(), ())
        return start(work)

    def children(self, layer: Path) -> list[int]:
        """Return the processes that read this layer and nothing else."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/fd/0") == str(layer):
                    found.append(int(name))
        return found

    async def child(self, layer: Path) -> int:
        """Return the process that makes this layer's image, once it has dropped its privileges."""
        found: list[int] = []

        def confined() -> bool:
            found[:] = self.children(layer)
            with contextlib.suppress(OSError):
                return bool(found) and "\nSeccomp:\t2\n" in Path(f"/proc/{found[0]}/status").read_text()
            return False

        await until(confined, "a child has begun")
        return found[0]


class ChildTests(WorkingCase):
    @needs_mounts
    @needs_programs("mkfs.erofs")
    @deferred
    async def test_a_child_that_dies_is_no_bad_layer_and_spoils_no_other(self) -> None:
        one, two = self.endless(), self.endless()
        first, second = self.begin(one, "one"), self.begin(two, "two")
        survivor = await self.child(two)
        os.kill(await self.child(one), signal.SIGSEGV)
        said = await self.failure(InfranetesError, first)
        self.assertIn(f"the process that makes the disk of layer {digest(TAR)} was killed by signal 11", said)
        self.assertEqual(self.children(two), [survivor])
        self.assertEqual(os.listdir(self.directory), ["two.part"])
        await self.build(TAR)
        self.assertEqual(self.children(two), [survivor])
        second.cancel()
        await self.failure(CancelledError, second)
        self.assertEqual(os.listdir(self.directory), ["image"])

    @needs_mounts
    @deferred
    async def test_each_is_another_user_with_its_own_layer_image_and_voice_alone(self) -> None:
        layers = (self.endless(), self.endless())
        works = [self.begin(layer, f"{number}") for number, layer in enumerate(layers)]
        users = set()
        for number, layer in enumerate(layers):
            pid = await self.child(layer)
            files = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            self.assertEqual(files.pop("2")[:5], "pipe:")
            self.assertEqual(files, {"0": str(layer), "1": str(self.directory / f"{number}.part")})
            limits = Path(f"/proc/{pid}/limits").read_text()
            self.assertIn(str(3 * int(Limits().seconds) + 1), limits)  # its own rlimit, set at the start
            users.update(re.findall(r"^Uid:\t([0-9]+)", Path(f"/proc/{pid}/status").read_text(), re.M))
        self.assertEqual(len(users - {"0"}), 2)
        for work in works:
            work.cancel()
            await self.failure(CancelledError, work)

    @needs_mounts
    @deferred
    async def test_all_are_made_by_one_process_until_nobody_has_needed_it_for_a_while(self) -> None:
        self.patch(process, "IDLE_SECONDS", 0.01)
        layers = (self.endless(), self.endless())
        works = [self.begin(layer, f"{number}") for number, layer in enumerate(layers)]
        parents = [self.parent(await self.child(layer)) for layer in layers]
        self.assertEqual(parents, parents[:1] * 2)
        for work in works:
            work.cancel()
            await self.failure(CancelledError, work)
        await until(lambda: not Path(f"/proc/{parents[0]}").exists(), "the process has ended")
        await self.build(TAR)

    @needs_mounts
    @deferred
    async def test_when_that_process_dies_it_is_said_and_the_next_layer_has_another(self) -> None:
        layer = self.endless()
        work = self.begin(layer, "image")
        child = await self.child(layer)
        os.kill(self.parent(child), signal.SIGKILL)
        said = await self.refused(InfranetesError, work)
        self.assertIn("of memory: see its log); call again", said)
        await until(lambda: not self.children(layer), "its child has died with it")
        await self.build(TAR)

    @needs_mounts
    @deferred
    async def test_when_that_process_does_not_answer_a_cancellation_ends_it(self) -> None:
        self.patch(process, "KILL_SECONDS", 0.01)
        layer = self.endless()
        work = self.begin(layer, "image")
        child = await self.child(layer)
        os.kill(self.parent(child), signal.SIGSTOP)
        work.cancel()
        await self.refused(CancelledError, work)
        await until(lambda: not self.children(layer), "its child has died with it")
        await self.build(TAR)

    def parent(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    @deferred
    async def test_no_child_outlives_a_deadline_or_a_cancellation(self) -> None:
        layer = self.endless()
        said = await self.refused(DeadlineExceeded, self.begin(layer, "image", Limits(seconds=0.2)))
        self.assertIn("took longer than 0.2 s", said)
        self.assertEqual(self.children(layer), [])
        cancelled = self.begin(layer, "image")
        reactor.callLater(0.2, cancelled.cancel)
        await self.refused(CancelledError, cancelled)
        self.assertEqual(self.children(layer), [])

    @deferred
    async def test_a_layer_or_a_directory_that_is_gone_is_said_so(self) -> None:
        missing = Path(self.mktemp()).absolute()
        work = self.builder.build(missing, "", self.target, digest(TAR), Limits())
        self.assertIn("No such file", await self.refused(FailedPrecondition, start(work)))
        target = missing / "image"
        work = self.builder.build(self.layer(TAR), "", target, digest(TAR), Limits())
        said = await self.refused(FailedPrecondition, start(work))
        self.assertIn(f"can't be made in {missing}: No such file", said)
