# SPDX-License-Identifier: Apache-2.0
"""Making an image in the child: what it may do, and what is left when it fails."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import zstandard
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from infranetes.images.erofs.build import Built, build
from infranetes.images.erofs.limits import Limits
from infranetes_common.concurrency import deferred, sleep, start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, ResourceExhausted
from infranetes_common.reactors import installed
from tests.infranetes.images.erofs.support import converted, digest, member, mounted, tar

reactor = installed()
TAR = tar([member("d/f", content=b"content" * 1000, mtime=5), member("e", content=b"small")])


class BuildCase(TestCase):
    timeout = 60

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.target = self.directory / "image"

    def layer(self, data: bytes) -> Path:
        path = Path(self.mktemp()).absolute()
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    def build(
        self, data: bytes, compression: str = "", diff_id: str = digest(TAR), limits: Limits | None = None
    ) -> Deferred[Built]:
        return start(build(reactor, self.layer(data), compression, self.target, diff_id, limits or Limits()))

    async def refused(self, kind: type[Exception], work: Deferred[Built]) -> str:
        """The message with which `work` fails. It has left nothing."""
        failed: Deferred[Any] = work  # Any: assertFailure makes it one of the error
        error: Exception = await self.assertFailure(failed, kind)
        self.assertEqual(os.listdir(self.directory), [])
        return str(error)


class BuildTests(BuildCase):
    @deferred
    async def test_the_image_is_the_same_however_the_layer_is_compressed(self) -> None:
        expected = converted(TAR, Path(self.mktemp()))
        frames = zstandard.compress(TAR[:5000]) + zstandard.compress(TAR[5000:])
        members = gzip.compress(TAR[:5000]) + gzip.compress(TAR[5000:]) + bytes(100)
        for compression, data in (("", TAR), ("gzip", members), ("zstd", frames)):
            built = await self.build(data, compression)
            self.assertEqual(self.target.read_bytes(), expected)
            self.assertEqual(built, Built(len(expected), digest(expected)))
            self.assertEqual(os.listdir(self.directory), ["image"])
        with mounted(self.target) as at:
            self.assertEqual((at / "d" / "f").read_bytes(), b"content" * 1000)

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


class ChildTests(BuildCase):
    def children(self, diff_id: str) -> list[int]:
        """The processes that make this layer's image."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if diff_id.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    @deferred
    async def test_a_child_that_is_killed_is_no_bad_layer(self) -> None:
        large = tar([member("large", content=os.urandom(1 << 20) * 64)])
        work = self.build(gzip.compress(large, 1), "gzip", digest(large))
        while not (children := self.children(digest(large))):
            await sleep(reactor, 0.01)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        said = await self.refused(InfranetesError, work)
        self.assertIn(
            f"the process that makes the disk of layer {digest(large)} was killed by signal 9", said
        )

    @deferred
    async def test_no_child_outlives_a_deadline_or_a_cancellation(self) -> None:
        large, _content = member("large", size=7 << 30)
        layer = self.layer(large.tobuf(tarfile.USTAR_FORMAT))
        os.truncate(layer, 8 << 30)  # a hole: no machine has read it before it is told to stop

        def begin(limits: Limits) -> Deferred[Built]:
            return start(build(reactor, layer, "", self.target, digest(TAR), limits))

        said = await self.refused(DeadlineExceeded, begin(Limits(seconds=0.2)))
        self.assertIn("took longer than 0.2 s", said)
        self.assertEqual(self.children(digest(TAR)), [])
        cancelled = begin(Limits())
        reactor.callLater(0.2, cancelled.cancel)
        await self.refused(CancelledError, cancelled)
        self.assertEqual(self.children(digest(TAR)), [])

    @deferred
    async def test_a_layer_or_a_directory_that_is_gone_is_said_so(self) -> None:
        missing = Path(self.mktemp()).absolute()
        work = build(reactor, missing, "", self.target, digest(TAR), Limits())
        self.assertIn("No such file", await self.refused(FailedPrecondition, start(work)))
        target = missing / "image"
        work = build(reactor, self.layer(TAR), "", target, digest(TAR), Limits())
        said = await self.refused(FailedPrecondition, start(work))
        self.assertIn(f"can't be made in {missing}: No such file", said)
