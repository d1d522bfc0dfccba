# SPDX-License-Identifier: Apache-2.0
"""Boot a guest in a plain QEMU, as nobody's pod: what a guest does by itself, and how long that takes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

from infranetes.providers.machine_images import Chipset, DiskBus, DiskFormat, Firmware, Hardware, NicModel
from tests.support.waiting import until

QEMU = "/usr/bin/qemu-system-x86_64"
#: What Infranetes gives a VM that asks for nothing else.
PLAIN = Hardware()
CPU = "max,-avx,-avx2,-erms,-fsrm,-la57"  # what emulation and Debian's systems agree on
BOOT_SECONDS = 180.0  # without KVM, on a machine that is busy with other work
OVMF = Path("/usr/share/OVMF")
_COLOURS = re.compile(r"\x1b\[[0-9;?=]*[A-Za-z]")
_NIC = {NicModel.VIRTIO: "virtio-net-pci", NicModel.E1000E: "e1000e", NicModel.RTL8139: "rtl8139"}
_DISK = {
    DiskBus.VIRTIO: ("virtio-blk-pci,drive=root",),
    DiskBus.SCSI: ("virtio-scsi-pci", "scsi-hd,drive=root"),
    DiskBus.IDE: ("ide-hd,drive=root",),
    DiskBus.NVME: ("nvme,drive=root,serial=root",),
}
_AHCI = ("ich9-ahci,id=ahci", "ide-hd,drive=root,bus=ahci.0")


class Machine:
    """A QEMU that boots a disk or CD, with a card on a network of its own that answers DHCP.

    What it writes goes to a copy that ends with it. :ivar process: QEMU's.
    """

    def __init__(
        self,
        image: Path,
        directory: Path,
        hardware: Hardware = PLAIN,
        *,
        memory: int = 512,
        port: int = 0,
        more: Sequence[str] = (),
        tap: int = -1,
        mac: str = "52:54:00:12:34:56",
        accelerator: str = "tcg",
    ) -> None:
        """Start it. It executes, and ends by `end`.

        :param directory: for its files. :param memory: MiB. :param port: of the guest, for `thd_page`.
        :param more: arguments for QEMU.
        :param tap: the descriptor of the tap that its card is on; -1: it has a network of its own.
        :param mac: its card's address. :param accelerator: QEMU's.
        """
        self._serial = directory / f"serial-{os.urandom(4).hex()}"
        self._address = _free_port()
        forward = f",hostfwd=tcp:127.0.0.1:{self._address}-:{port}" if port else ""
        chipset = "q35,smm=on" if hardware.chipset is Chipset.Q35 else "pc"
        self._monitor, monitor = socket.socketpair()
        with self._serial.open("xb") as serial, monitor:
            self.process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "--", QEMU),
                    # One processor: with two that are emulated, a kernel has stood still while it booted.
                    *(
                        "-machine",
                        f"{chipset},accel={accelerator}",
                        "-cpu",
                        "host" if accelerator == "kvm" else CPU,
                        "-m",
                        str(memory),
                    ),
                    *("-nodefaults", "-display", "none", "-vga", "std", "-serial", "stdio"),
                    *("-chardev", f"socket,id=monitor,fd={monitor.fileno()}"),
                    *("-mon", "chardev=monitor,mode=readline"),
                    *_firmware(hardware.firmware, directory),
                    *_root(image, hardware),
                    *("-netdev", f"user,id=net{forward}" if tap < 0 else f"tap,id=net,fd={tap}"),
                    *("-device", f"{_NIC[hardware.nic]},netdev=net,mac={mac}"),
                    *more,
                ],
                stdin=subprocess.PIPE,
                stdout=serial,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=(monitor.fileno(), *([tap] if tap >= 0 else [])),
            )

    @property
    def console(self) -> str:
        """What its serial console has shown until now, without colours."""
        return _COLOURS.sub("", self._serial.read_text(errors="replace")).replace("\r", "")

    async def until(self, holds: str | Callable[[], object], seconds: float = BOOT_SECONDS) -> None:
        """Wait until its console shows some words, or something else holds.

        :raise AssertionError: it does not, or QEMU has ended before.
        """
        what = holds if isinstance(holds, str) else "what is expected"

        def seen() -> object:
            found = holds in self.console if isinstance(holds, str) else holds()
            return found or self.process.poll() is not None

        try:
            await until(seen, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.console[-3000:]}") from None
        if isinstance(holds, str) and holds not in self.console:
            error_output = self.process.stderr.read() if self.process.stderr else ""
            raise AssertionError(f"QEMU has ended, without {holds!r}: {error_output}\n{self.console[-3000:]}")

    async def until_off(self, seconds: float = 60.0) -> int:
        """Wait until QEMU has ended, which it does when its guest powers off, and return its exit code."""
        await until(lambda: self.process.poll() is not None, f"the end of\n{self.console[-3000:]}", seconds)
        return self.process.returncode

    def type(self, text: str) -> None:
        """Type into its serial console."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def press_power_button(self) -> None:
        """Ask the guest by ACPI to power off."""
        self._monitor.sendall(b"system_powerdown\n")

    def thd_page(self) -> dict[str, str]:
        """Return the lines `key=value` of the page that it shows on its forwarded port. Blocks."""
        with urlopen(f"http://127.0.0.1:{self._address}/", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def answers(self) -> bool:
        """Return whether it takes a connection on its forwarded port and answers there."""
        try:
            return bool(self.thd_page())
        except (OSError, ValueError):
            return False

    def end(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        self._monitor.close()


async def boot(
    image: Path, directory: Path, hardware: Hardware, shows: str, seconds: float = BOOT_SECONDS
) -> str:
    """Boot an image until its console shows these words, and return all that it has shown then.

    :raise AssertionError: it does not show them.
    """
    machine = Machine(image, directory, hardware)
    try:
        await machine.until(shows, seconds)
        return machine.console
    finally:
        machine.end()


def format_of(image: Path) -> DiskFormat:
    """Return the format of a guest's file, by its name."""
    return {".raw": DiskFormat.RAW, ".qcow2": DiskFormat.QCOW2, ".iso": DiskFormat.ISO}[image.suffix]


def _root(image: Path, hardware: Hardware) -> list[str]:
    form = format_of(image)
    if form is DiskFormat.ISO:
        drive = f"file={image},format=raw,if=none,id=root,read-only=on"
        devices: Sequence[str] = ("ide-cd,drive=root",)
    else:
        drive = f"file={image},format={form.value},if=none,id=root,snapshot=on,cache=unsafe"
        sata_of_pc = hardware.disk is DiskBus.SATA and hardware.chipset is Chipset.PC
        devices = (
            _AHCI if sata_of_pc else _DISK[DiskBus.IDE if hardware.disk is DiskBus.SATA else hardware.disk]
        )
    *controllers, disk = devices
    words = [word for each in controllers for word in ("-device", each)]
    return ["-drive", drive, *words, "-device", f"{disk},bootindex=0"]


def _firmware(firmware: Firmware, directory: Path) -> list[str]:
    if firmware is Firmware.BIOS:
        return []
    secure = firmware is Firmware.SECURE_BOOT
    variables = directory / f"variables-{os.urandom(4).hex()}"
    variables.write_bytes((OVMF / f"OVMF_VARS_4M{'.ms' if secure else ''}.fd").read_bytes())
    code = OVMF / f"OVMF_CODE_4M{'.secboot' if secure else ''}.fd"
    return [
        *(("-global", "driver=cfi.pflash01,property=secure,value=on") if secure else ()),
        *("-drive", f"if=pflash,format=raw,readonly=on,unit=0,file={code}"),
        *("-drive", f"if=pflash,format=raw,unit=1,file={variables}"),
    ]


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
