# SPDX-License-Identifier: Apache-2.0
"""A VM that was kept, loaded into another QEMU, where it goes on."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from infranetes.providers.qemu.keep.state import HARDWARE, MEMORY
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes.providers.qemu.program.sockets import QMP, connect_monitor
from infranetes.providers.qemu.template.template import DISK
from infranetes_common.concurrency import sleep
from infranetes_common.reactors import installed
from tests.support import numbered_files

reactor = installed()
_KEPT_DISK, _FIRST_LAYER = 16, 20  # numbers of descriptors


@attrs.frozen
class KeptVm:
    """A VM in files. :ivar original: the process of the VM that was kept, which runs."""

    directory: Path
    original: int
    work: Path

    async def writes_again(self, cleanup: Callable[..., object]) -> int:
        """Load it and let it execute for some seconds. Return how often its guest has written to its disk.

        :param cleanup: gets what is to be called at the end. :raise AssertionError: the guest has ended."""
        process = self._start()
        cleanup(process.wait)
        cleanup(process.kill)
        qmp = await connect_monitor(reactor, self.work)
        cleanup(qmp.close)
        await self._load(qmp)
        await qmp.execute("cont")
        for _ in range(40):
            await sleep(reactor, 0.5)
            assert process.poll() is None, (self.work / "console").read_text()[-2000:]
        stats = await qmp.execute("query-blockstats")
        return sum(int(each["stats"]["wr_operations"]) for each in stats if "virtio" in each.get("qdev", ""))

    async def _load(self, qmp: QmpConnection) -> None:
        await qmp.execute("query-status")
        file = os.open(self.directory / MEMORY, os.O_RDONLY)
        try:
            await qmp.pass_file("memory", file)
        finally:
            os.close(file)
        await qmp.execute("migrate-incoming", 60.0, uri="fd:memory")
        while (status := (await qmp.execute("query-migrate", 60.0)).get("status")) != "completed":
            assert status != "failed", "QEMU does not take what was kept"
            await sleep(reactor, 0.1)

    def _start(self) -> subprocess.Popen[bytes]:
        hardware = json.loads((self.directory / HARDWARE).read_bytes())
        files = self._files(hardware)
        given = Path(f"/proc/{self.original}/cmdline").read_bytes().decode().split("\0")[:-1]
        try:
            return numbered_files.popen([*_adapted(given), *_plugged(hardware)], files)
        finally:
            for file in files.values():
                os.close(file)

    def _files(self, hardware: Mapping[str, Any]) -> dict[int, int]:
        fds = Path(f"/proc/{self.original}/fd")
        top = self.work / "top.qcow2"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", top, str(hardware["disk"])], check=True)
        ram = os.memfd_create("loaded")
        os.truncate(ram, int(hardware["memory_mib"]) << 20)
        files: dict[int, int] = {
            Fd.RAM: ram,
            Fd.DISK: os.open(top, os.O_RDWR),
            _KEPT_DISK: os.open(self.directory / DISK, os.O_RDONLY),
            Fd.TEMPLATE_DISK: os.open(fds / str(int(Fd.TEMPLATE_DISK)), os.O_RDONLY),
            Fd.IMAGE_DISK: os.open(fds / str(int(Fd.IMAGE_DISK)), os.O_RDONLY),
            Fd.CONSOLE: os.open(self.work / "console", os.O_RDWR | os.O_CREAT, 0o600),
            Fd.TAP: open_tap(f"infl{secrets.token_hex(4)}"),
        }
        sockets: dict[int, str] = {Fd.QMP: QMP, Fd.IDENTITY: "identity", Fd.AGENT: "agent"}
        for number, name in sockets.items():
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.work / name))
            listener.listen()
            files[number] = listener.detach()
        layers = {
            each.stat().st_size: each for each in fds.iterdir() if "/images/disks/" in os.readlink(each)
        }
        for number, disk in enumerate(hardware["disks"]):
            files[_FIRST_LAYER + number] = os.open(layers[disk["size"]], os.O_RDONLY)
        return files


def _path(number: int) -> str:
    return f"/proc/self/fd/{number}"


def _adapted(words: Sequence[str]) -> Iterator[str]:
    """Yield the original's arguments, with the disk that was kept below a new layer."""
    for word in words:
        if word.startswith("driver=qcow2,node-name=disk"):
            kept = f"backing.driver=qcow2,backing.file.driver=file,backing.file.filename={_path(_KEPT_DISK)},"
            own, first, below = word.partition("backing.driver=")
            middle, again, image = below.partition("backing.backing.driver=")
            image = image.replace("backing.backing.", "backing.backing.backing.")
            middle = middle.replace("backing.", "backing.backing.")
            yield f"{own}{kept}backing.{first}{middle}backing.{again}{image}"
        elif word.startswith("guest="):
            yield "guest=loaded"
        else:
            yield word


def _plugged(hardware: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments for what was plugged in."""
    for core in hardware["cores"]:
        yield from ("-device", f"max-x86_64-cpu,id=cpu{core},socket-id=0,core-id={core},thread-id=0")
    for piece in hardware["pieces"]:
        yield from ("-object", f"memory-backend-ram,id={piece['memory']},size={piece['mib']}M")
        place = f"memdev={piece['memory']},addr={piece['address']},slot={piece['slot']}"
        yield from ("-device", f"pc-dimm,id={piece['device']},{place}")
    for number, disk in enumerate(hardware["disks"]):
        file = f"driver=file,filename={_path(_FIRST_LAYER + number)},read-only=on,locking=off"
        yield from ("-blockdev", f"{file},auto-read-only=off,node-name=layer{number}")
        place = f"bus=scsi0.0,scsi-id={disk['target']},lun={disk['lun']},drive=layer{number}"
        serial = f"serial={disk['name'][:36]},device_id={disk['name'][:20]}"
        yield from ("-device", f"scsi-hd,id=layer{number}-device,{place},{serial}")
