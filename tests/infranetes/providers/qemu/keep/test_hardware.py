# SPDX-License-Identifier: Apache-2.0
"""The hardware of a VM that is kept, as its QEMU tells it, and as another one is given it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import ShownDisk
from infranetes.providers.qemu.keep.hardware import Disk, Hardware, Piece, add_plugged, decode, read
from infranetes.providers.qemu.keep.unchanged import UnchangedHardware
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.disks import node_id
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes.providers.qemu.vm.sizes import Hotplug
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.volume_disks import serial_of
from tests.infranetes.providers.qemu.sleep.test_volumes import Hardware as Unchanging

RECORD = VmRecord(
    "0" * 32, "sandbox", "cluster", "node", "10.0.0.2", 1.0, phase=Phase.READY,
    template="template", template_made_at="7", image="image",
)  # fmt: skip
LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)
LAYER = "a" * 64
PIECES = (Piece("dimm0", "more", 4 << 30, 0, 256), Piece("dimm1", "more1", 8 << 30, 1, 1024))
HARDWARE = Hardware(
    "7.2.22 Debian", "tcg", "image", "template", 1024, 1 << 30, "7", (1, 2), PIECES,
    (Disk(LAYER, 0, 3, 4096, "/images/layer"),),
)  # fmt: skip


class ValueTests(SynchronousTestCase):
    def test_it_is_decoded_as_it_was_encoded(self) -> None:
        self.assertEqual(decode(HARDWARE.encode()), HARDWARE)

    def test_whatever_else_there_is_is_no_hardware(self) -> None:
        for content in (b"", b"{}", b"[]", b"null", b"7", b'{"cores": [{}], "pieces": [], "disks": []}'):
            self.assertRaises(ValueError, decode, content)
        wrong = HARDWARE.encode().replace(b'"slot"', b'"slat"')
        self.assertRaises(ValueError, decode, wrong)

    def test_all_of_its_memory_and_processors_count(self) -> None:
        self.assertEqual(HARDWARE.memory, (1024 + 256 + 1024) * MIB)
        self.assertEqual(HARDWARE.more, Hotplug(2, 1280))
        said = HARDWARE.described()
        self.assertEqual((said["memory"], said["processors"]), (str(HARDWARE.memory), "3"))

    def test_only_tcg_emulates(self) -> None:
        self.assertTrue(HARDWARE.emulated)
        self.assertFalse(attrs.evolve(HARDWARE, accelerator="kvm").emulated)


class Qmp:
    """A QEMU with that hardware. :ivar answers: by command. :ivar given: what it was told, in order."""

    def __init__(self) -> None:
        self.given: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {
            "query-version": {"qemu": {"major": 7, "minor": 2, "micro": 22}, "package": "Debian"},
            "query-memory-size-summary": {"base-memory": 1024 * MIB},
            "query-memory-devices": [
                {
                    "type": "dimm",
                    "data": {
                        "id": piece.device,
                        "memdev": f"/objects/{piece.memory}",
                        "addr": piece.address,
                        "slot": piece.slot,
                        "size": piece.mib * MIB,
                    },
                }
                for piece in PIECES
            ],
            "query-kvm": {"enabled": False},
            "query-hotpluggable-cpus": [
                {"props": {"core-id": 3}},
                {"props": {"core-id": 2}, "qom-path": "/machine/peripheral/cpu2"},
                {"props": {"core-id": 1}, "qom-path": "/machine/peripheral/cpu1"},
                {"props": {"core-id": 0}, "qom-path": "/machine/unattached/device[0]"},
            ],
            "qom-list": [{"name": "cpu1"}, {"name": f"shown-0-3-{LAYER}"}],
            "query-named-block-nodes": [
                {"node-name": "disk", "image": {"virtual-size": 1 << 30}},
                {"node-name": node_id(ShownDisk(LAYER, 0, 3)), "image": {"virtual-size": 4096}},
            ],
        }

    async def execute(self, command: str, **arguments: Any) -> Any:
        self.given.append((command, arguments))
        return self.answers.get(command, {})


class ReadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.shown = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.shown)
        self.qemu = Qmp()

    def read(self) -> Hardware:
        return self.successResultOf(start(read(cast(QmpConnection, self.qemu), RECORD, self.shown)))

    def test_what_qemu_says_and_the_record_is_its_hardware(self) -> None:
        (self.shown / LAYER).symlink_to("/images/layer")
        self.assertEqual(self.read(), HARDWARE)
        self.qemu.answers["query-kvm"] = {"enabled": True}
        self.assertEqual(self.read().accelerator, "kvm")

    def test_the_file_of_a_disk_that_an_earlier_release_has_shown_is_not_known(self) -> None:
        for unreadable in (False, True):
            if unreadable:
                (self.shown / LAYER).write_bytes(b"no link")
            self.assertEqual([disk.path for disk in self.read().disks], [""])

    def test_of_an_answer_that_makes_no_sense_nothing_is_taken(self) -> None:
        for command, answer in (
            ("query-version", {}),
            ("query-memory-size-summary", {"base-memory": "much"}),
            ("query-memory-devices", [{"data": {}}]),
            ("query-hotpluggable-cpus", [{"props": {}, "qom-path": "x"}]),
            ("query-named-block-nodes", []),
            ("query-named-block-nodes", [{"node-name": "disk", "image": {}}]),
        ):
            self.qemu = Qmp()
            self.qemu.answers[command] = answer
            work = start(read(cast(QmpConnection, self.qemu), RECORD, self.shown))
            self.failureResultOf(work, Unavailable)

    def test_another_qemu_gets_each_piece_at_its_place_and_each_processor(self) -> None:
        qemu = Qmp()
        self.successResultOf(start(add_plugged(cast(QmpConnection, qemu), HARDWARE, LINE)))
        processors = [given for command, given in qemu.given[:2]]
        self.assertEqual([one["core_id"] for one in processors], [1, 2])
        expected = []
        for piece in PIECES:
            size = piece.mib * MIB
            backend = {"qom_type": "memory-backend-ram", "id": piece.memory, "size": size}
            expected.append(("object-add", backend))
            place = {"memdev": piece.memory, "addr": piece.address, "slot": piece.slot}
            expected.append(("device_add", {"driver": "pc-dimm", "id": piece.device, **place}))
        self.assertEqual(qemu.given[2:], expected)


class UnchangedTests(SynchronousTestCase):
    """While a VM is kept, nothing of its hardware changes."""

    def setUp(self) -> None:
        self.hardware = Unchanging()
        self.asked = 0

    async def all_volumes(self) -> Any:
        self.asked += 1
        return [type("Volume", (), {"id": id}) for id in ("vol-a", "vol-b")]

    def within(self, look: Callable[[Any], Any]) -> Any:
        stand_in: Any = self.hardware

        async def inside() -> Any:
            unchanged = UnchangedHardware(stand_in, stand_in, stand_in, self.all_volumes)
            async with unchanged.of(cast(Any, None)) as volumes:
                return look(volumes)

        return self.successResultOf(start(inside()))

    def test_disks_sizes_and_volumes_all_wait(self) -> None:
        self.assertEqual(self.within(lambda _: self.hardware.held), 3)
        self.assertEqual((self.hardware.held, self.asked), (0, 0))

    def test_volumes_are_named_and_others_told_by_their_serials(self) -> None:
        self.hardware.luns = {serial_of("vol-a"): (4, False), "another": (5, False)}
        self.assertEqual(self.within(lambda volumes: volumes), {"vol-a", "another"})
