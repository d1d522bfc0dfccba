# SPDX-License-Identifier: Apache-2.0
"""Volumes are written, listed, read, watched and removed through the agent's RPCs."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import DIRECTORY, FILE, SYMLINK, Bounds, Change, Entry, Removed
from infranetes_common.filesync.scan import scan
from infranetes_common.filesync.wire import PREFIX, change_to_wire
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_mounts, needs_programs, needs_root
from tests.vmserver.rpc.test_agent import ID, AgentCase
from txgrpc import Code
from vmserver.machine.mounts import mounts_below
from vmserver.volumes import store
from vmserver.volumes.store import VolumeStore

BOUNDS = messages.VolumeBounds(entries=100, bytes=1_000_000)


@needs_root
@needs_programs("busybox")
class VolumeCallTests(AgentCase):
    async def put(self, *changes: Change, id: str = "v1", file: bool = False, **fields: Any) -> None:
        fields.setdefault("bounds", BOUNDS)

        def requests() -> Any:
            header = messages.VolumeHeader(id=id, file=file, **fields)
            yield messages.PutVolumeRequest(header=header)
            for change in changes:
                yield messages.PutVolumeRequest(change=change_to_wire(change))

        await self.stub.PutVolume(requests(), timeout=10.0)

    async def listed(self, id: str = "v1") -> dict[bytes, Any]:
        found = {}
        request = messages.ListVolumeRequest(id=id, bounds=BOUNDS)
        async for page in self.stub.ListVolume(request, timeout=10.0):
            found.update({entry.path: entry for entry in page.entries})
        return found

    @property
    def path(self) -> Path:
        return self.agent.config.volumes_dir / "v1" / "directory"

    async def test_a_directory_comes_changes_and_goes(self) -> None:
        new: list[Change] = [
            Entry(b"d", DIRECTORY, 0o755, 0, 0),
            Entry(b"d/f", FILE, 0o640, 1, 2, 3, 77),
            b"abc",
            Entry(b"l", SYMLINK, 0o777, 0, 0, target=b"d/f"),
        ]
        await self.put(*new)
        await self.put(*new)
        self.assertEqual((self.path / "l").read_bytes(), b"abc")
        self.assertEqual(sorted(await self.listed()), [b"", b"d", b"d/f", b"l"])
        await self.put(Removed(b"l"), Removed(b"nothing"))
        entries = (await self.listed()).values()
        self.assertEqual([entry.path for entry in entries], [b"", b"d", b"d/f"])
        read = messages.ReadVolumeRequest(id="v1", entries=list(entries))
        data = [change.data async for change in self.stub.ReadVolume(read, timeout=5.0)]
        self.assertEqual(b"".join(data), b"abc")
        for _ in range(2):
            await self.stub.RemoveVolume(messages.RemoveVolumeRequest(id="v1"), timeout=5.0)
        self.assertFalse(self.path.parent.exists())
        await self.refused(Code.NOT_FOUND, self.listed())

    @needs_mounts
    async def test_one_entry_that_fails_is_named_and_the_others_are_written(self) -> None:
        await self.put(Entry(b"busy", DIRECTORY, 0o755, 0, 0))
        busy = self.path / "busy"
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(busy)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(busy)])
        changes: list[Change] = [
            Entry(b"busy", FILE, 0o640, 1, 2, 3, 77), b"abc",
            Entry(b"z", FILE, 0o640, 1, 2, 3, 77), b"xyz",
        ]  # fmt: skip
        message = await self.refused(Code.FAILED_PRECONDITION, self.put(*changes))
        self.assertIn("busy: Device or resource busy", message)
        self.assertEqual((self.path / "z").read_bytes(), b"xyz")

    async def test_secrets_are_apart_and_nobody_elses(self) -> None:
        await self.put(Entry(b"token", FILE, 0o600, 0, 0, 1), b"x", in_memory=True)
        memory = self.agent.config.run_dir / "volumes"
        self.assertEqual((memory / "v1" / "directory" / "token").read_bytes(), b"x")
        self.assertEqual(memory.stat().st_mode & 0o777, 0o700)
        self.assertFalse(self.path.exists())

    async def test_what_a_volume_takes_is_told_of_those_that_are_there(self) -> None:
        await self.put(Entry(b"f", FILE, 0o640, 1, 2, 3, 77), b"abc")
        (self.path / "large").write_bytes(bytes(1 << 20))
        request = messages.MeasureVolumesRequest(ids=["v1", "v2"])
        (found,) = (await self.stub.MeasureVolumes(request, timeout=10.0)).volumes
        self.assertEqual((found.id, found.written.inodes), ("v1", 2))
        self.assertGreaterEqual(found.written.bytes, 1 << 20)

    async def test_a_container_may_mount_a_part_which_is_made(self) -> None:
        await self.put(Entry(b"", DIRECTORY, 0o2777, 0, 7))
        mounts = [cri.Mount(container_path="/m", host_path=f"{PREFIX}v1/a/b")]
        config = cri.ContainerConfig(command=["true"], mounts=mounts)
        await self.load()
        request = messages.CreateContainerRequest(id=ID, image_id=self.image.id, config=config)
        await self.stub.CreateContainer(request, timeout=10.0)
        found = (self.path / "a" / "b").stat()
        self.assertEqual((found.st_mode & 0o7777, found.st_gid), (0o2777, 7))
        (self.path / "out").symlink_to("/etc")
        config.mounts[0].host_path = f"{PREFIX}v1/out/new"
        request = messages.CreateContainerRequest(id=ID[::-1], image_id=self.image.id, config=config)
        message = await self.refused(Code.INVALID_ARGUMENT, self.stub.CreateContainer(request, timeout=10.0))
        self.assertIn("subPath 'out/new' of volume v1 leads out of it by a link", message)

    async def test_a_watcher_is_told_of_what_is_written_in_the_vm(self) -> None:
        await self.put()
        request = messages.WatchVolumesRequest(ids=["v1"], bounds=BOUNDS)
        watching = self.stub.WatchVolumes(request, timeout=20.0)
        told = []
        async for event in watching:
            told.append(event.id)
            if len(told) == 2:
                break
            (self.path / "new").write_bytes(b"")
        watching.cancel()
        self.assertEqual(told, ["v1", "v1"])

    async def test_bad_input(self) -> None:
        bad = Code.INVALID_ARGUMENT
        await self.refused(bad, self.put(id="../x"))
        await self.refused(bad, self.put(bounds=None))
        await self.refused(bad, self.put(Entry(b"../x", FILE, 0o600, 0, 0)))
        await self.refused(bad, self.put(Entry(b"f", FILE, 0o600, 0, 0, 5), b"abc"))
        await self.refused(bad, self.put(b"abc"))
        await self.refused(Code.RESOURCE_EXHAUSTED, self.put(Entry(b"f", FILE, 0o600, 0, 0, 2_000_000)))
        await self.refused(Code.FAILED_PRECONDITION, self.put(file=True))
        self.assertEqual(os.listdir(self.path), [])

        async def without_header() -> Any:
            def requests() -> Any:
                yield messages.PutVolumeRequest()

            return await self.stub.PutVolume(requests(), timeout=5.0)

        await self.refused(bad, without_header())
        await self.refused(bad, self.stub.RemoveVolume(messages.RemoveVolumeRequest(id="/"), timeout=5.0))
        await self.load()
        config = cri.ContainerConfig(mounts=[cri.Mount(container_path="/x", host_path=PREFIX + "none")])
        request = messages.CreateContainerRequest(id=ID, image_id=self.image.id, config=config)
        await self.refused(bad, self.stub.CreateContainer(request, timeout=5.0))


@needs_mounts
class MemoryTests(SynchronousTestCase):
    def test_secrets_are_on_a_tmpfs_of_their_own(self) -> None:
        top = Path(self.mktemp()).absolute()
        top.mkdir()
        memory = top / "memory"
        self.addCleanup(subprocess.run, ["umount", "-l", str(memory)])
        for _ in range(2):
            VolumeStore(top / "disk", memory, mount=True).make("v1", file=True, in_memory=True)
        kind = subprocess.run(["stat", "-f", "-c", "%T", memory / "v1" / "file"], capture_output=True)
        self.assertEqual(kind.stdout, b"tmpfs\n")
        self.assertEqual(memory.stat().st_mode & 0o777, 0o700)

    def mounting(self) -> tuple[VolumeStore, Path]:
        """Return a store that mounts what it needs, and the directory of its memory."""
        top = Path(self.mktemp()).absolute()
        top.mkdir()
        memory = top / "memory"
        self.addCleanup(subprocess.run, ["umount", "-l", str(memory)])
        made = VolumeStore(top / "disk", memory, mount=True)
        return made, memory

    def test_a_directory_with_a_size_limit_is_a_file_system_of_that_size_until_it_is_removed(self) -> None:
        made, memory = self.mounting()
        for _ in range(2):
            made.make("v1", file=False, in_memory=True, size_limit=10 << 20)
            at = made.path("v1")
            found = os.statvfs(at)
            self.assertEqual(found.f_blocks * found.f_frsize, 10 << 20)
            (at / "kept").touch()
        self.assertEqual(sorted(scan(made.tree("v1"), Bounds(10, 1000))), [b"", b"kept"])
        mounted = [each.point for each in mounts_below(memory)]
        self.assertEqual(mounted, [str(at)])
        for _ in range(2):
            made.remove("v1")
            self.assertEqual(mounts_below(memory), [])
        self.assertFalse(at.exists())

    def test_a_file_system_that_could_not_be_mounted_is_the_next_time(self) -> None:
        made, _ = self.mounting()
        make = partial(made.make, "v1", file=False, in_memory=True, size_limit=1 << 20)

        def refused(source: str, at: str, *arguments: object) -> None:
            raise FailedPrecondition(f"no memory for {at}")

        make()
        made.remove("v1")  # then only the volume's own mount is refused
        patched = self.patch(store, "mount", refused)
        self.assertRaises(FailedPrecondition, make)
        patched.restore()
        make()
        self.assertTrue(os.path.ismount(made.path("v1")))

    def test_a_directory_of_huge_pages_is_a_file_system_of_that_size_until_it_is_removed(self) -> None:
        made, memory = self.mounting()
        for id, size_limit in (("v1", 0), ("v2", 8 << 20)):
            for _ in range(2):
                made.make(id, file=False, in_memory=True, size_limit=size_limit, huge_page_size=2 << 20)
            found = os.statvfs(made.path(id))
            self.assertEqual((found.f_bsize, found.f_blocks * found.f_bsize), (2 << 20, size_limit))
        kinds = {each.kind for each in mounts_below(memory)}
        self.assertEqual((kinds, len(mounts_below(memory))), ({"hugetlbfs"}, 2))
        for id in ("v1", "v2"):
            made.remove(id)
        self.assertEqual(mounts_below(memory), [])

    def test_what_kubelet_makes_in_huge_pages_is_brought_there(self) -> None:
        made, _ = self.mounting()
        tree = made.make("v1", file=False, in_memory=True, huge_page_size=2 << 20)
        applier = Applier(tree, Bounds(10, 1000))
        for path, mode in ((b"", 0o2775), (b"a", 0o777)):
            applier.feed([Entry(path, DIRECTORY, mode, 0, 2000, 0, 5 * 10**9)])
        applier.finish()
        applier.check_whole()
        found = {path: (one.mode, one.gid) for path, one in scan(tree, Bounds(10, 1000)).items()}
        self.assertEqual(found, {b"": (0o2775, 2000), b"a": (0o777, 2000)})

    def test_huge_pages_that_the_machine_lacks_are_refused(self) -> None:
        made, memory = self.mounting()
        wrong = partial(made.make, "v1", file=False, in_memory=True, huge_page_size=3 << 20)
        error = self.assertRaises(FailedPrecondition, wrong)
        self.assertIn("hugepages-3Mi", str(error))
        self.assertFalse(memory.exists())
        shared = VolumeStore(Path("/nowhere"), Path("/nowhere"), mount=False)
        wrong = partial(shared.make, "v1", file=False, in_memory=True, huge_page_size=2 << 20)
        self.assertRaises(FailedPrecondition, wrong)

    def test_nothing_else_has_a_size_limit_or_huge_pages(self) -> None:
        made = VolumeStore(Path("/nowhere"), Path("/nowhere"), mount=True)
        for file, in_memory in ((True, True), (False, False)):
            for limit, pages in ((1, 0), (0, 2 << 20)):
                wrong = partial(
                    made.make, "v1", file=file, in_memory=in_memory, size_limit=limit, huge_page_size=pages
                )
                self.assertRaises(InvalidArgument, wrong)

    def test_without_a_tmpfs_there_is_no_secret(self) -> None:
        top = Path(self.mktemp()).absolute()
        top.mkdir()

        def refused(*arguments: object) -> None:
            raise FailedPrecondition("tmpfs can't be mounted")

        self.patch(store, "mount", refused)
        self.assertRaises(
            FailedPrecondition, VolumeStore(top, top / "memory", mount=True).make, "v1", file=True,
            in_memory=True,
        )  # fmt: skip
        self.assertFalse((top / "memory" / "v1").exists())


@needs_mounts
class MountedBelowTests(SynchronousTestCase):
    def test_what_a_container_mounts_below_is_neither_carried_nor_removed(self) -> None:
        top = Path(self.mktemp()).absolute()
        top.mkdir()
        store = VolumeStore(top / "disk", top / "memory", mount=False)
        store.make("v1", file=False, in_memory=False)
        at = store.path("v1") / "a b"
        at.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(at)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(at)], capture_output=True)
        (at / "theirs").write_text("x")
        held = os.open(at, os.O_RDONLY)
        self.addCleanup(os.close, held)
        self.assertEqual(sorted(scan(store.tree("v1"), Bounds(10, 1000))), [b"", b"a b"])
        for _ in range(2):
            store.remove("v1")
        self.assertFalse((top / "disk" / "v1").exists())
        self.assertEqual(os.listdir(held), ["theirs"])
