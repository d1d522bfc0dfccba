# SPDX-License-Identifier: Apache-2.0
"""From an image of the node to the disk that VMs boot copies of."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.internet.defer import TimeoutError as DeferredTimeout

from infranetes.images.machine.disk import BaseDisk, DiskFormat
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.images.machine import builders
from tests.infranetes.images.machine.builders import MIB, patched
from tests.infranetes.images.machine.support import MachineCase
from tests.infranetes.images.support import reactor
from tests.support import oci
from tests.support.file_systems import mounted
from tests.support.waiting import until


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@needs_programs("skopeo", "docker-registry", "qemu-img")
class BaseTests(MachineCase):
    async def test_a_container_disk_becomes_a_base(self) -> None:
        disk = self.qcow2(builders.gpt_disk(builders.fat(), code=True))
        base = await self.machine.base(await self.pulled({"disk/a.qcow2": disk}))
        self.assertEqual(
            base,
            BaseDisk(sha256(disk), base.path, DiskFormat.QCOW2, 64 * MIB, True, True, False),
        )
        self.assertEqual(base.path.read_bytes(), disk)

    async def test_a_base_is_readable_and_in_a_directory_that_is_closed(self) -> None:
        """QEMU of another user opens it again, by the descriptor that it inherits."""
        base = await self.machine.base(await self.pulled({"disk/a.img": self.qcow2()}))
        self.assertEqual(stat.S_IMODE(base.path.stat().st_mode), 0o444)
        self.assertEqual(stat.S_IMODE(base.path.parent.stat().st_mode), 0o700)

    async def test_all_formats_are_known_by_their_content(self) -> None:
        raw, iso = builders.mbr().ljust(MIB, b"\0"), builders.iso(efi=builders.fat())
        for name, disk, kind, size, bios, uefi in (
            ("raw", raw, DiskFormat.RAW, MIB, True, False),
            ("odd", raw[:-100], DiskFormat.RAW, MIB, True, False),  # QEMU counts in whole sectors
            ("iso", iso, DiskFormat.ISO, len(iso), True, True),
        ):
            base = await self.machine.base(await self.pulled({"disk/disk.img": disk}, name))
            self.assertEqual((base.format, base.virtual_size), (kind, size), name)
            self.assertEqual((base.boots_by_bios, base.boots_by_uefi), (bios, uefi), name)
            self.assertEqual(base.path.read_bytes(), disk)

    async def test_compressed_disks_are_decompressed(self) -> None:
        disk = self.qcow2()
        for name, data in (("gz", gzip.compress(disk)), ("xz", lzma.compress(disk))):
            base = await self.machine.base(await self.pulled({f"disk/a.qcow2.{name}": data}, name))
            self.assertEqual(base.path.read_bytes(), disk)
            self.assertEqual(base.digest, sha256(data))

    async def test_an_artifact_is_the_base_itself_and_takes_no_further_room(self) -> None:
        disk = self.qcow2()
        image = await self.store.pull(self.registry.push("vm", "1", oci.disk(disk)))
        base = await self.machine.base(image)
        self.assertEqual((base.digest, base.format), (sha256(disk), DiskFormat.QCOW2))
        self.assertTrue(base.path.samefile(self.store.files(image.id).layers[0].path))

    async def test_a_compressed_artifact_is_decompressed(self) -> None:
        disk = self.qcow2()
        artifact = oci.disk(gzip.compress(disk), layer_type="application/gzip")
        base = await self.machine.base(await self.store.pull(self.registry.push("vm", "1", artifact)))
        self.assertEqual(base.path.read_bytes(), disk)

    async def test_the_label_says_that_our_agent_is_in_it(self) -> None:
        disk = self.qcow2()
        for value, has in (("true", True), ("false", False), ("yes", False)):
            labels = {"io.infranetes.agent": value}
            image = await self.pulled({"disk/a.qcow2": disk}, f"vm-{value}", config={"Labels": labels})
            self.assertIs((await self.machine.base(image)).has_agent, has)
        self.assertEqual(len(self.files()), 1)  # of one content there is one base

    async def test_equal_calls_share_the_work_and_all_are_told_how_far_it_is(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        others: list[str] = []
        waiting = [start(self.machine.base(image, told)) for told in (self.told.append, others.append)]
        self.assertEqual(len({await each for each in waiting}), 1)
        self.assertEqual(self.told, others)
        self.assertIn("looking at the disk", self.told[-1])

    async def test_it_is_made_once_and_found_by_the_next_daemon(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        base = await self.machine.base(image)
        inode = base.path.stat().st_ino
        self.assertEqual(await self.machine.base(image), base)
        _, machine = await self.new_machine(qemu_img="/nonexistent")
        self.assertEqual(await machine.base(image), base)
        self.assertEqual(base.path.stat().st_ino, inode)

    async def test_it_goes_with_the_last_image_that_has_it(self) -> None:
        disk = self.qcow2()
        images = [
            await self.pulled({"disk/a.qcow2": disk}, "vm"),
            await self.store.pull(self.registry.push("artifact", "1", oci.disk(disk))),
        ]
        for image in images:
            await self.machine.base(image)
        self.assertEqual(len(self.files()), 1)
        await self.store.remove(images[0].id)
        self.assertEqual(len(self.files()), 1)
        await self.store.remove(images[1].id)
        self.assertEqual(self.files(), set())
        self.assertIn("pull it", await self.fails(NotFound, self.machine.base(images[0])))

    async def test_one_that_is_held_stays_for_a_launch_after_its_image_was_removed(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        async with self.store.held(image.id):
            base = await self.machine.base(image)
            await self.store.remove(image.id)
            self.assertTrue(base.path.exists())
        self.assertEqual(self.files(), set())

    async def test_what_was_removed_while_no_daemon_ran_goes_at_the_start(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        await self.machine.base(image)
        await (await self.new_store()).remove(image.id)
        await self.new_machine()
        self.assertEqual(self.files(), set())

    async def test_one_that_was_changed_is_made_again_as_another_file(self) -> None:
        disk = self.qcow2()
        image = await self.pulled({"disk/a.qcow2": disk})
        base = await self.machine.base(image)
        with open(base.path, "r+b") as before:
            before.write(b"changed by an administrator")
            again = await self.machine.base(image)
            self.assertEqual(again.path.read_bytes(), disk)
            before.seek(0)
            self.assertEqual(before.read(7), b"changed")  # a VM that has it keeps what it has

    async def test_an_image_that_can_not_be_recorded_leaves_another_ones_base(self) -> None:
        disk = self.qcow2()
        base = await self.machine.base(await self.pulled({"disk/a.qcow2": disk}))
        (self.directory / "machines" / "bases.json.new").mkdir()  # in the way
        artifact = await self.store.pull(self.registry.push("artifact", "1", oci.disk(disk)))
        await self.fails(FailedPrecondition, self.machine.base(artifact))
        self.assertEqual(base.path.read_bytes(), disk)

    async def test_a_directory_that_somebody_removed_is_told(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        (self.directory / "machines" / "new").rmdir()
        words = await self.fails(FailedPrecondition, self.machine.base(image))
        self.assertIn("No such file or directory", words)

    async def test_an_index_that_is_broken_costs_only_time(self) -> None:
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        base = await self.machine.base(image)
        for text in ("{", "[]", '{"version": 99}'):
            (self.directory / "machines" / "bases.json").write_text(text)
            _, machine = await self.new_machine()
            self.assertEqual(self.files(), set())
            self.assertEqual(await machine.base(image), base)


@needs_programs("skopeo", "docker-registry", "qemu-img")
class RefusalTests(MachineCase):
    async def refused(self, files: dict[str, bytes], name: str = "bad") -> str:
        words = await self.fails(
            FailedPrecondition, self.machine.base(await self.pulled({**files, "name": name.encode()}, name))
        )
        self.assertIn(f"/{name}:1", words)
        self.assert_no_unfinished()
        self.assertEqual(self.files(), set())
        return words

    async def test_an_image_without_a_disk_or_with_two(self) -> None:
        self.assertIn("no disk", await self.refused({"etc/passwd": b""}))
        self.assertIn("several", await self.refused({"disk/a": bytes(512), "disk/b": bytes(512)}, "two"))

    async def test_a_qcow2_that_names_other_files_or_is_encrypted(self) -> None:
        disk = self.qcow2()
        for name, words, bad in (
            ("backing", "backing file", patched(disk, 8, struct.pack(">QI", 1024, 8))),
            ("data", "another file", patched(disk, 72, struct.pack(">Q", 4))),
            ("luks", "encrypted", patched(disk, 32, struct.pack(">I", 2))),
        ):
            self.assertIn(words, await self.refused({"disk/a.qcow2": bad}, name))

    async def test_a_size_that_no_disk_may_have(self) -> None:
        store, self.machine = await self.new_machine(max_disk_bytes=MIB)
        self.store = store
        self.assertIn("images.max_disk_bytes", await self.refused({"disk/a.qcow2": self.qcow2()}))
        self.assertIn("images.max_disk_bytes", await self.refused({"disk/a": bytes(2 * MIB)}, "raw"))

    async def test_tables_that_only_qemu_img_looks_at(self) -> None:
        disk = self.qcow2(builders.mbr())
        l1_at = int.from_bytes(disk[40:48], "big")
        counts_at = int.from_bytes(disk[48:56], "big")
        for name, at, new in (
            ("entry", l1_at, struct.pack(">Q", 1 << 63 | 512)),  # no table begins within a cluster
            ("counts", counts_at, struct.pack(">Q", 0x10000 * 1000)),
        ):
            words = await self.refused({"disk/a.qcow2": patched(disk, at, new)}, name)
            self.assertIn("corrupt or truncated", words)
            self.assertIn("qemu-img check -r all", words)

    async def test_clusters_that_nothing_uses_are_no_fault(self) -> None:
        disk = self.qcow2()
        block_at = int.from_bytes(disk[(at := int.from_bytes(disk[48:56], "big")) : at + 8], "big")
        unused = len(disk) // 65536  # behind the file's end
        leaking = patched(disk.ljust(len(disk) + 65536, b"\0"), block_at + 2 * unused, struct.pack(">H", 1))
        base = await self.machine.base(await self.pulled({"disk/a.qcow2": leaking}))
        checked = subprocess.run(["qemu-img", "check", str(base.path)], capture_output=True)
        self.assertEqual(checked.returncode, 3)

    async def test_a_truncated_one(self) -> None:
        disk = self.qcow2(b"x" * MIB)
        self.assertIn("truncated", await self.refused({"disk/a.qcow2": disk[: len(disk) // 2]}))

    async def test_one_that_is_said_to_be_qcow2_and_is_none(self) -> None:
        self.assertIn("said to be qcow2", await self.refused({"disk/a.qcow2": bytes(MIB)}))

    async def test_a_raw_one_that_a_guest_made_look_like_qcow2_is_raw(self) -> None:
        disk = patched(self.qcow2(), 8, struct.pack(">QI", 1024, 8))
        base = await self.machine.base(await self.pulled({"disk/a.raw": disk}))
        self.assertEqual((base.format, base.path.read_bytes()), (DiskFormat.RAW, disk))

    async def test_one_for_other_machines_is_said_to_be(self) -> None:
        esp = builders.fat(["BOOTAA64.EFI"])
        words = await self.refused({"disk/a.qcow2": self.qcow2(builders.gpt_disk(esp))})
        self.assertIn("it is for arm64 machines", words)

    async def test_a_file_that_is_empty_or_in_another_format(self) -> None:
        self.assertIn("truncated", await self.refused({"disk/a.img": b""}, "empty"))
        self.assertIn("-f vmdk", await self.refused({"disk/a.img": b"KDMV" + bytes(2000)}, "vmdk"))

    async def test_what_qemu_img_reads_otherwise_than_we_do(self) -> None:
        for name, info in (
            ("size", {"format": "qcow2", "virtual-size": 1 << 40}),
            ("file", {"format": "qcow2", "virtual-size": 64 * MIB, "backing-filename": "x"}),
            ("none", "none"),
        ):
            program = self.script(f"echo '{json.dumps(info)}'")
            self.store, self.machine = await self.new_machine(qemu_img=program)
            words = await self.refused({"disk/a.qcow2": self.qcow2()}, name)
            self.assertIn("qemu-img", words)

    async def test_without_qemu_img_it_is_said_what_to_install(self) -> None:
        self.store, self.machine = await self.new_machine(qemu_img="no-such-qemu-img")
        image = await self.pulled({"disk/a.qcow2": self.qcow2()})
        self.assertIn("qemu-utils", await self.fails(FailedPrecondition, self.machine.base(image)))
        self.assert_no_unfinished()


@needs_programs("skopeo", "docker-registry", "qemu-img")
class EndTests(MachineCase):
    """Ends in the middle."""

    def looking(self) -> bool:
        """Whether the disk is being looked at by the program that does not end."""
        return bool(self.sleepers())

    def unfinished(self) -> list[str]:
        return os.listdir(self.directory / "machines" / "new")

    def sleepers(self) -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"86321" in words:
                    found.append(int(entry))
        return found

    async def begin(self) -> None:
        await super().begin()
        self.endless = self.script("exec sleep 86321")
        self.store, self.machine = await self.new_machine(qemu_img=self.endless)
        self.image = await self.pulled({"disk/a.qcow2": self.qcow2()})

    async def test_who_is_cancelled_finds_the_work_going_on(self) -> None:
        first = start(self.machine.base(self.image))
        await until(self.looking, "it is looked at")
        first.cancel()
        await self.assertFailure(first, CancelledError)
        second = start(self.machine.base(self.image, self.told.append))
        await self.assertFailure(second.addTimeout(0.05, reactor), DeferredTimeout)
        self.assertEqual(len(self.sleepers()), 1)

    async def test_a_stop_ends_it_and_leaves_nothing(self) -> None:
        waiting = start(self.machine.base(self.image))
        await until(self.looking, "it is looked at")
        await self.machine.stop()
        self.assertIn("stopping", await self.fails(Unavailable, waiting))
        self.assertIn("stopping", await self.fails(Unavailable, self.machine.base(self.image)))
        self.assertEqual(self.sleepers(), [])
        self.assert_no_unfinished()

    async def test_what_looks_at_a_disk_has_no_rights_and_no_network(self) -> None:
        waiting = start(self.machine.base(self.image))
        await until(self.looking, "it is looked at")
        (process,) = self.sleepers()
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        self.assertEqual((status["NoNewPrivs"], status["Seccomp"]), ("1", "2"))
        self.assertEqual(int(status["CapEff"], 16), 0)
        if os.getuid() == 0:
            self.assertGreater(int(status["Uid"].split()[0]), 1_900_000_000)
        limits = Path(f"/proc/{process}/limits").read_text()
        for name in ("cpu time", "file size", "address space", "core file size"):
            line = next(line for line in limits.splitlines() if line.startswith(f"Max {name}"))
            self.assertNotIn("unlimited", line)
        await self.machine.stop()
        await self.fails(Unavailable, waiting)

    async def test_an_image_that_is_removed_meanwhile_leaves_no_disk(self) -> None:
        store, machine = await self.new_machine()
        waiting = start(machine.base(self.image))
        await store.remove(self.image.id)
        self.assertIn("pull it", await self.fails(NotFound, waiting))
        self.assertEqual(self.files(), set())
        self.assert_no_unfinished()

    async def test_a_daemon_that_is_killed_leaves_nothing_to_the_next(self) -> None:
        script = (
            "import sys\n"
            "from twisted.internet import task, defer\n"
            "from infranetes.images import ImageStore\n"
            "from infranetes.images.machine.registry_disks import RegistryDisks\n"
            "async def main(reactor):\n"
            "    store = ImageStore(reactor, sys.argv[1])\n"
            "    machine = RegistryDisks(reactor, store, qemu_img=sys.argv[2])\n"
            "    await store.start()\n"
            "    await machine.start()\n"
            "    await machine.base(store.list()[0])\n"
            "task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))\n"
        )
        for step in ("writing", "looking"):
            words = [sys.executable, "-c", script, str(self.directory), self.endless]
            daemon = subprocess.Popen(words)
            await until(self.looking if step == "looking" else self.unfinished, f"it is {step}")
            daemon.kill()
            daemon.wait()
            await until(lambda: not self.sleepers(), "nobody looks at it any more", 60)
            _, machine = await self.new_machine()
            self.assert_no_unfinished()
            self.assertEqual(self.files(), set())
        self.assertEqual((await machine.base(self.image)).virtual_size, 64 * MIB)


@needs_mounts
@needs_programs("skopeo", "docker-registry", "qemu-img")
class FullDiskTests(MachineCase):
    def setUp(self) -> object:
        self.mount = mounted(self, "tmpfs", 8 * MIB)
        return super().setUp()

    async def begin(self) -> None:
        self.directory = self.mount / "images"
        await super().begin()

    async def test_it_is_said_and_nothing_is_left(self) -> None:
        image = await self.pulled({"disk/a.img": gzip.compress(os.urandom(3 * MIB))})
        filler = self.mount / "filler"
        filler.write_bytes(bytes(3 * MIB))
        words = await self.fails(ResourceExhausted, self.machine.base(image))
        self.assertIn("make room", words)
        self.assert_no_unfinished()
        self.assertEqual(self.files(), set())
        filler.unlink()
        self.assertEqual((await self.machine.base(image)).virtual_size, 3 * MIB)

    async def test_an_index_that_can_not_be_written_leaves_no_base(self) -> None:
        image = await self.pulled({"disk/a.img": bytes(MIB)})
        (self.directory / "machines" / "bases.json.new").mkdir()  # in the way
        await self.fails(FailedPrecondition, self.machine.base(image))
        self.assertEqual(self.files(), {"bases.json.new"})
        self.assert_no_unfinished()

    async def test_without_one_free_byte_a_base_can_be_removed(self) -> None:
        image = await self.pulled({"disk/a.img": os.urandom(MIB)})
        await self.machine.base(image)
        with open(self.mount / "filler", "wb") as filler:
            while _written(filler.fileno()):
                pass
        await self.store.remove(image.id)
        self.assertEqual(self.files(), set())


def _written(descriptor: int) -> int:
    try:
        return os.write(descriptor, bytes(4096))
    except OSError:
        return 0
