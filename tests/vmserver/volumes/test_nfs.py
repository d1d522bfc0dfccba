# SPDX-License-Identifier: Apache-2.0
"""The agent's NFS mounts. Other file systems stand in for servers, including one that hangs;
tests/e2e/test_volumes.py has a real server."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.nfs import NfsMount, checked
from infranetes_common.reactors import installed
from tests.harness.needs import needs_mounts, needs_root
from tests.support.failures import FailureAssertions
from tests.support.fuse import HangingMounts
from vmserver.machine.mounts import Flag, mount, mounts, mounts_below, unmount
from vmserver.volumes import nfs as nfs_module
from vmserver.volumes.nfs import NfsMounts
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore

reactor = installed()
_OPTIONS = ("vers=4.2", "addr=192.0.2.7")
WANTED = checked("files:/data", _OPTIONS)


@needs_root
class NfsCase(FailureAssertions, TestCase):
    """:ivar asked: what has been mounted. :ivar error: the error of the next mounts."""

    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir()
        self.export = self.top / "export"
        self.make_export()
        self.asked: list[str] = []
        self.error: int = 0
        self.nfs = self.made()
        self.addCleanup(self.unmount_all)

    def make_export(self) -> None:
        """Make a file system that can be mounted."""
        self.export.mkdir()
        mount("tmpfs", str(self.export), "tmpfs")

    def made(self) -> NfsMounts:
        """Return the mounts as a new agent has them."""
        made = NfsMounts(reactor, self.top / "disks", lambda: "", self.mount_export)
        self.addCleanup(made.stop)
        return made

    def mount_export(self, wanted: NfsMount, at: Path) -> None:
        self.asked.append(wanted.source)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        mount(str(self.export), str(at), "", Flag.BIND)

    def unmount_all(self) -> None:
        for one in reversed(mounts_below(self.top)):
            unmount(one.point)

    def point(self, wanted: NfsMount = WANTED) -> Path:
        return self.top / "disks" / wanted.id / "directory"

    def left(self) -> list[str]:
        """Return what is mounted here, without the servers' own mounts."""
        own = {str(self.export), str(self.top / "export")}
        return [one.point for one in mounts_below(self.top) if one.point not in own]

    def is_mounted(self, wanted: NfsMount = WANTED) -> bool:
        return any(one.point == str(self.point(wanted)) for one in mounts())


@needs_mounts
class NfsMountsTests(NfsCase):
    async def test_one_mount_is_for_all_containers_and_ends_with_the_last(self) -> None:
        for container in ("a", "a", "b"):
            self.assertEqual(await self.nfs.mount(container, WANTED), WANTED.id)
        self.assertEqual(self.asked, ["files:/data"])
        await self.nfs.release("a")
        self.assertTrue(self.is_mounted())
        self.nfs = self.made()
        for _ in range(2):
            await self.nfs.release("b")
            self.assertEqual(os.listdir(self.top / "disks"), [])
            self.assertEqual(self.left(), [])

    async def test_other_options_are_another_mount(self) -> None:
        other = checked("files:/data", (*_OPTIONS, "noexec"))
        await self.nfs.mount("a", WANTED)
        await self.nfs.mount("b", other)
        await self.nfs.release("b")
        self.assertEqual((self.is_mounted(), self.is_mounted(other)), (True, False))

    async def test_containers_find_it_and_its_parts_by_its_id(self) -> None:
        await self.nfs.mount("a", WANTED)
        (self.export / "part").mkdir()
        (self.export / "out").symlink_to("/etc")
        store = VolumeStore(self.top / "disk", self.top / "memory", self.top / "disks", mount=True)
        parts = VolumeParts(store, self.top / "parts", mount=True)

        def placed(path: str) -> str:
            return parts.place("a", 0, path)

        whole = await self.nfs.place(PREFIX + WANTED.id, lambda: placed(PREFIX + WANTED.id))
        self.assertEqual(whole, str(self.point()))
        path = f"{PREFIX}{WANTED.id}/part"
        part = Path(await self.nfs.place(path, lambda: placed(path)))
        (part / "file").write_text("shared")
        self.assertEqual((self.export / "part" / "file").read_text(), "shared")
        path = f"{PREFIX}{WANTED.id}/out"
        self.assertIn(
            "leads out of it", await self.fails(Exception, self.nfs.place(path, lambda: placed(path)))
        )
        self.assertEqual(await self.nfs.place("/dev/fuse", lambda: "/dev/fuse"), "/dev/fuse")

    async def test_what_the_kernel_says_is_put_into_words(self) -> None:
        for number, kind, words in (
            (errno.EACCES, FailedPrecondition, "addresses of pods"),
            (errno.ENOENT, FailedPrecondition, "no such directory"),
            (errno.ENODEV, FailedPrecondition, "no NFS"),
            (errno.EINVAL, FailedPrecondition, "addr=192.0.2.7,vers=4.2"),
            (errno.ECONNREFUSED, FailedPrecondition, "Connection refused"),
            (errno.ETIMEDOUT, FailedPrecondition, "NetworkPolicies"),
            (errno.ENOMEM, ResourceExhausted, "memory"),
        ):
            self.error = number
            self.assertIn(words, await self.fails(kind, self.nfs.mount("a", WANTED)))
            self.assertEqual(os.listdir(self.top / "disks"), [])
        self.error = 0
        await self.nfs.mount("a", WANTED)

    async def test_after_a_reboot_its_place_is_not_taken_for_it_until_the_node_has_it_mounted(self) -> None:
        await self.nfs.mount("a", WANTED)
        (self.export / "file").write_text("here")
        self.nfs = self.made()
        await self.nfs.restore()
        self.assertTrue(self.is_mounted(), "the agent alone was restarted")
        unmount(str(self.point()))
        self.nfs = self.made()
        for _ in range(2):
            await self.nfs.restore()
            self.assertFalse(self.point().exists())
        await self.nfs.mount("a", WANTED)
        self.assertEqual((self.point() / "file").read_text(), "here")
        await self.nfs.release("a")
        self.assertEqual(os.listdir(self.top / "disks"), [])

    async def test_a_refusal_for_one_container_leaves_others_what_they_have(self) -> None:
        await self.nfs.mount("a", WANTED)
        other = checked("files:/other", _OPTIONS)
        self.error = errno.EACCES
        await self.fails(FailedPrecondition, self.nfs.mount("b", other))
        await self.nfs.release("b")
        self.assertTrue(self.is_mounted())

    async def test_servers_know_each_machine_by_a_name_of_its_own(self) -> None:
        file = self.top / "identifier"
        self.patch(nfs_module, "_IDENTIFIER", file)
        names = set()
        for owner in ("one", "other", "one"):
            file.touch()
            self.nfs = NfsMounts(reactor, self.top / "disks", partial(str, owner), self.mount_export)
            self.addCleanup(self.nfs.stop)
            await self.nfs.mount("a", WANTED)
            await self.nfs.release("a")
            names.add(file.read_text())
        self.assertEqual([len(name) for name in names], [32, 32])

    async def test_a_kernel_without_nfs_has_no_name_and_says_what_it_lacks(self) -> None:
        self.patch(nfs_module, "_IDENTIFIER", self.top / "none" / "identifier")
        self.error = errno.ENODEV
        self.nfs = NfsMounts(reactor, self.top / "disks", lambda: "one", self.mount_export)
        self.addCleanup(self.nfs.stop)
        self.assertIn("no NFS", await self.fails(FailedPrecondition, self.nfs.mount("a", WANTED)))

    async def test_there_is_a_most(self) -> None:
        self.patch(nfs_module, "MAX_MOUNTS", 2)
        wanted = [checked(f"files:/{number}", _OPTIONS) for number in range(3)]
        for one in wanted[:2]:
            await self.nfs.mount("a", one)
        await self.fails(ResourceExhausted, self.nfs.mount("a", wanted[2]))
        await self.nfs.mount("b", wanted[0])
        await self.nfs.unmount_all(10)
        self.assertEqual(self.left(), [])

    async def test_everything_is_unmounted_for_a_pod_that_ends(self) -> None:
        other = checked("files:/other", _OPTIONS)
        for wanted in (WANTED, other):
            await self.nfs.mount("a", wanted)
        self.nfs = self.made()
        for _ in range(2):
            await self.nfs.unmount_all(10)
            self.assertEqual(self.left(), [])


@needs_mounts
class ServerGoneTests(NfsCase):
    def make_export(self) -> None:
        self.server = HangingMounts(self.export)
        self.addCleanup(self.server.end)

    def setUp(self) -> None:
        super().setUp()
        for name in ("MOUNT_SECONDS", "ANSWER_SECONDS", "UNMOUNT_SECONDS"):
            self.patch(nfs_module, name, 1.0)

    async def test_no_call_waits_for_it_and_another_server_is_none_the_worse(self) -> None:
        await self.nfs.mount("a", WANTED)
        self.server.hang()
        path = PREFIX + WANTED.id
        looks: list[str] = []
        self.assertIn("192.0.2.7", await self.fails(DeadlineExceeded, self.nfs.mount("b", WANTED)))
        words = await self.fails(DeadlineExceeded, self.nfs.place(path, lambda: looks.append(path)))
        self.assertIn("files:/data", words)
        self.assertEqual(looks, [])
        await self.nfs.release("a")  # the error is logged
        self.assertIn("files:/data", await self.fails(DeadlineExceeded, self.nfs.unmount_all(1)))
        self.assertEqual(await self.nfs.place("/x", lambda: "/x"), "/x")
        other = checked("files:/other", _OPTIONS)
        self.export = self.top / "other"
        super().make_export()
        await self.nfs.mount("b", other)
        self.assertTrue(self.is_mounted(other))

    async def test_when_it_is_back_so_is_the_volume(self) -> None:
        await self.nfs.mount("a", WANTED)
        self.server.hang()
        await self.fails(DeadlineExceeded, self.nfs.mount("b", WANTED))
        self.server.go_on()
        await self.eventually(partial(self.nfs.mount, "b", WANTED))
        await self.nfs.release("a")
        await self.nfs.release("b")
        self.assertFalse(self.is_mounted())

    async def eventually(self, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await work()
                return
            except DeadlineExceeded:
                await deferLater(reactor, 0.1, lambda: None)

    async def test_a_mount_that_comes_too_late_does_not_stay(self) -> None:
        begun, goes_on = Deferred[None](), threading.Event()
        mount_export = self.mount_export

        def slow(wanted: NfsMount, at: Path) -> None:
            reactor.callFromThread(begun.callback, None)
            goes_on.wait()
            mount_export(wanted, at)

        self.addCleanup(goes_on.set)
        self.nfs = NfsMounts(reactor, self.top / "disks", lambda: "", slow)
        self.addCleanup(self.nfs.stop)
        waiting = start(self.fails(DeadlineExceeded, self.nfs.mount("a", WANTED)))
        await begun
        self.assertIn("does not answer", await waiting)
        goes_on.set()
        while (self.top / "disks").exists() and os.listdir(self.top / "disks"):
            await deferLater(reactor, 0.05, lambda: None)
        self.assertEqual(self.left(), [])
        self.assertEqual(self.asked, ["files:/data"])
