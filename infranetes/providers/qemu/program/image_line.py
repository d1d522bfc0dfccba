# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line for a VM that boots an image of anybody's.

As with clones, QEMU starts as a user without rights and can open no file by itself: it inherits an open
descriptor of each file, and here uses it as it was opened (/dev/fdset), so that no file need be that user's.
A guest that powers off, or panics, leaves a QEMU that waits: whoever asks it learns what has happened.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence

import attrs

from infranetes.providers.machine_images import (
    DRIVES,
    Chipset,
    DiskBus,
    DiskFormat,
    Firmware,
    Hardware,
    NicModel,
)
from infranetes.providers.qemu.program.command_line import (
    IDENTITY_PORT,
    NETDEV,
    NIC,
    SANDBOX,
    SCSI,
    CommandLine,
)
from infranetes.providers.volumes import ROOT_SERIAL
from infranetes_common.errors import InvalidArgument

GUEST_AGENT_PORT = "org.qemu.guest_agent.0"
ROOT = "root"  # the root disk's node
ISO = "iso"  # the node of a CD to boot
MOST_DISKS = 16  # that have a slot of the PCI bus each, and CDs
_OWN_SCSI = "scsi1"
_IDE_PLACES = 4
_SATA_PLACES = 6
_SERIAL = re.compile(r"[0-9a-zA-Z-]{1,20}")
_MACHINE_SERIAL = re.compile(r"[ -~]{1,255}")
_CPU = re.compile(r"[A-Za-z0-9_.,=+-]+")
_UUIDS = uuid.UUID("b4a5c1b0-6f0e-4d0e-9d0b-0d9a6c8f7e21")  # of machines whose sandboxes' ids are the names
# What Windows uses. The emulated ones are those that QEMU lets a guest have without KVM.
_HYPERV = ("hv-relaxed", "hv-vapic", "hv-spinlocks=0x1fff", "hv-time", "hv-frequencies")
_HYPERV_KVM = ("hv-vpindex", "hv-runtime", "hv-synic", "hv-stimer")


class ImageFd(enum.IntEnum):
    """The numbers of the descriptors that QEMU inherits beside those of disks, which begin with DISKS."""

    LOG = 3
    CONSOLE = 4
    TAP = 5
    QMP = 6
    IDENTITY = 7
    GUEST_AGENT = 8
    TPM = 9
    FIRMWARE = 10
    VARIABLES = 11
    DISKS = 16


@attrs.frozen
class OpenDisk:
    """A file with a disk that QEMU inherits."""

    fd: int
    format: DiskFormat
    block_device: bool = False  # of the node
    direct: bool = False  # used without the page cache


@attrs.frozen
class ImageDisk:
    """A disk of the VM."""

    name: str  # of QEMU's node
    serial: str
    top: OpenDisk
    base: OpenDisk | None = None  # below `top`, for what was not written there
    read_only: bool = False
    kept: bool = True  # it outlives the VM: what the guest flushes reaches the medium


@attrs.frozen
class ImageMachine:
    """Everything that the command line depends on beside the node's own."""

    hardware: Hardware
    sandbox_id: str
    mac: str
    mtu: int
    memory_mib: int
    cpus: int
    disks: Sequence[ImageDisk]  # the root first
    iso: int | None = None  # the descriptor of a CD that may be booted
    has_agent: bool = False


def check(hardware: Hardware, accelerator: str) -> None:
    """Check that there can be such a machine. :raise InvalidArgument: there can't."""
    if hardware.firmware is Firmware.SECURE_BOOT and hardware.chipset is Chipset.PC:
        raise InvalidArgument("Secure Boot needs the chipset q35: pc has nothing to keep its variables safe")
    if hardware.disk is DiskBus.IDE and hardware.chipset is Chipset.Q35:
        raise InvalidArgument("the chipset q35 has no IDE: ask for the chipset pc, or for disks on sata")
    if hardware.cpu_model and not _CPU.fullmatch(hardware.cpu_model):
        raise InvalidArgument(f"{hardware.cpu_model[:80]!r} can't be a processor model of QEMU's")
    if accelerator == "tcg" and model_of(hardware) == "host":
        raise InvalidArgument("the processor model host needs KVM, which this node does not use")
    if hardware.serial and not _MACHINE_SERIAL.fullmatch(hardware.serial):
        raise InvalidArgument("a machine's serial has to be up to 255 printable characters of ASCII")
    if hardware.uuid:
        try:
            uuid.UUID(hardware.uuid)
        except ValueError:
            raise InvalidArgument(f"{hardware.uuid[:80]!r} is no UUID for a machine") from None


def check_disks(hardware: Hardware, serials: Iterable[str], has_iso: bool) -> None:
    """Check that the VM has places for these disks, beside its root. :raise InvalidArgument: it has not."""
    found = list(serials)
    for serial in found:
        if not _SERIAL.fullmatch(serial):
            raise InvalidArgument(f"a disk's serial has to be up to 20 of 0-9a-zA-Z-, not {serial[:80]!r}")
    if len(set(found)) < len(found) or ROOT_SERIAL in found:
        raise InvalidArgument(f"two disks of a VM have the same serial, or one has the root's: {found}")
    most = MOST_DISKS
    if hardware.disk is DiskBus.IDE:
        most = _IDE_PLACES - DRIVES - has_iso
    if 1 + len(found) > most:
        raise InvalidArgument(
            f"a VM with {1 + len(found)} disks can't be: on {hardware.disk.value} it has {most} at most, "
            "beside its CDs"
        )


def drive(number: int) -> str:
    """Return the id, in QEMU, of the CD drive with this number."""
    return f"drive{number}"


def model_of(hardware: Hardware) -> str:
    """Return the processor model without its features; "": the provider's."""
    return hardware.cpu_model.partition(",")[0]


def machine_uuid(hardware: Hardware, sandbox_id: str) -> str:
    """Return the machine's UUID, as its guest sees it."""
    return str(uuid.UUID(hardware.uuid) if hardware.uuid else uuid.uuid5(_UUIDS, sandbox_id))


def arguments(line: CommandLine, machine: ImageMachine) -> list[str]:
    """Return QEMU's arguments; the VM is prepared by them, and executes nothing until it is told to.

    :param line: the node's, of which the accelerator and its processor model are used."""
    hardware = machine.hardware
    return [
        *("-nodefaults", "-no-user-config", "-display", "none", "-S"),
        *("-sandbox", SANDBOX),
        *("-action", "reboot=reset,shutdown=pause,panic=pause,watchdog=reset"),
        *_board(hardware),
        *("-accel", line.accelerator_argument()),
        *("-cpu", _cpu(line, hardware)),
        *("-smp", f"cpus={machine.cpus},sockets=1,cores={machine.cpus},threads=1"),
        *("-m", f"size={machine.memory_mib}M"),
        *("-rtc", f"base={'localtime' if hardware.local_time else 'utc'},driftfix=slew"),
        *_smbios(hardware, machine.sandbox_id),
        *_channels(machine),
        *_nic(machine),
        *_screen(hardware),
        *_others(hardware),
        *_Buses(hardware).attach(machine),
    ]


def _board(hardware: Hardware) -> Iterator[str]:
    options = [hardware.chipset.value, "hpet=off", "vmport=off"]
    if hardware.firmware is Firmware.SECURE_BOOT:
        options.append("smm=on")
    if hardware.firmware is not Firmware.BIOS:
        options += ["pflash0=firmware", "pflash1=variables"]
        for fd, name, read_only in (
            (ImageFd.FIRMWARE, "firmware", True),
            (ImageFd.VARIABLES, "variables", False),
        ):
            yield from _file(fd)
            yield from ("-blockdev", ",".join([*_plain(name, OpenDisk(fd, DiskFormat.RAW), read_only)]))
    yield from ("-machine", ",".join(options))
    if hardware.firmware is Firmware.SECURE_BOOT:
        # Only the firmware in its own mode writes the variables, or a guest could enrol keys of its own.
        yield from ("-global", "driver=cfi.pflash01,property=secure,value=on")
    suspending = "ICH9-LPC" if hardware.chipset is Chipset.Q35 else "PIIX4_PM"
    yield from ("-global", f"{suspending}.disable_s3=1", "-global", f"{suspending}.disable_s4=1")


def _cpu(line: CommandLine, hardware: Hardware) -> str:
    words = [hardware.cpu_model or line.cpu]
    if hardware.hyperv:
        words += [*_HYPERV, *(_HYPERV_KVM if line.accelerator == "kvm" else ())]
    return ",".join(words)


def _smbios(hardware: Hardware, sandbox_id: str) -> list[str]:
    own, serial = machine_uuid(hardware, sandbox_id), hardware.serial or sandbox_id
    product = "manufacturer=Infranetes,product=VM"
    return ["-uuid", own, "-smbios", f"type=1,{product},uuid={own},serial={_escaped(serial)}"]


def _channels(machine: ImageMachine) -> list[str]:
    """The channels between the VM and the node: the console, the agents' and QEMU's own."""
    words = [
        *_file(ImageFd.LOG),
        "-chardev",
        f"socket,id=console,fd={ImageFd.CONSOLE:d},server=on,wait=off,logfile={_path(ImageFd.LOG)},"
        "logappend=on",
        *("-serial", "chardev:console"),
        *("-chardev", f"socket,id=qmp,fd={ImageFd.QMP:d},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        *("-device", "virtio-serial-pci,id=ports"),
        *("-chardev", f"socket,id=guest-agent,fd={ImageFd.GUEST_AGENT:d},server=on,wait=off"),
        *("-device", f"virtserialport,bus=ports.0,nr=1,chardev=guest-agent,name={GUEST_AGENT_PORT}"),
    ]
    if machine.has_agent:
        words += [
            *("-chardev", f"socket,id=identity,fd={ImageFd.IDENTITY:d},server=on,wait=off"),
            *("-device", f"virtserialport,bus=ports.0,nr=2,chardev=identity,name={IDENTITY_PORT}"),
        ]
    return words


_NICS = {NicModel.VIRTIO: "virtio-net-pci", NicModel.E1000E: "e1000e", NicModel.RTL8139: "rtl8139"}


def _nic(machine: ImageMachine) -> list[str]:
    model = machine.hardware.nic
    device = f"{_NICS[model]},id={NIC},netdev={NETDEV},mac={machine.mac},romfile="
    if model is NicModel.VIRTIO:
        device += f",host_mtu={machine.mtu}"
    return ["-netdev", f"tap,id={NETDEV},fd={ImageFd.TAP:d}", "-device", device]


def _screen(hardware: Hardware) -> list[str]:
    # Old systems know the USB controller of their time alone.
    usb = "qemu-xhci" if hardware.chipset is Chipset.Q35 else "piix3-usb-uhci"
    # There is a VNC server, and nobody can connect to it: the daemon hands it each connection.
    return [
        *("-vnc", "none", "-device", "VGA,id=screen"),
        *("-device", f"{usb},id=usb", "-device", "usb-tablet,bus=usb.0"),
    ]


def _others(hardware: Hardware) -> Iterator[str]:
    yield from ("-device", "virtio-rng-pci")
    yield from ("-device", "virtio-balloon-pci,id=balloon,free-page-reporting=on")
    yield from ("-device", "pvpanic")
    if hardware.watchdog:
        yield from ("-device", "i6300esb,id=watchdog")
    if hardware.tpm:
        yield from ("-chardev", f"socket,id=tpm,fd={ImageFd.TPM:d}")
        yield from ("-tpmdev", "emulator,id=tpm0,chardev=tpm", "-device", "tpm-tis,tpmdev=tpm0")


class _Buses:
    """Gives disks and CDs their places, and makes the controllers that these need."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._sata = 0
        self._ide = 0
        self._scsi = 0
        self._boots = 0

    def attach(self, machine: ImageMachine) -> Iterator[str]:
        """Return the arguments of a machine's disks and CDs."""
        if DiskBus.SCSI in (self._hardware.disk, self._bus_of_drives()):
            # One for what is there from the start, and one for disks that come while it runs.
            yield from ("-device", f"virtio-scsi-pci,id={_OWN_SCSI},num_queues=2")
            yield from ("-device", f"virtio-scsi-pci,id={SCSI},num_queues=2")
        for disk in machine.disks:
            yield from self._disk(disk)
        if machine.iso is not None:
            yield from self._iso(machine.iso)
        for number in range(DRIVES):
            yield from self._place(self._bus_of_drives(), "cd", f"id={drive(number)}")

    def _disk(self, disk: ImageDisk) -> Iterator[str]:
        for each in (disk.top, disk.base):
            if each is not None:
                yield from _file(each.fd)
        yield from ("-blockdev", ",".join(_layers(disk)))
        first = ",bootindex=0" if disk.name == ROOT else ""
        self._boots += bool(first)
        yield from self._place(self._hardware.disk, "hd", f"drive={disk.name},serial={disk.serial}{first}")

    def _iso(self, fd: int) -> Iterator[str]:
        """A CD that is booted if the root disk can't be, in a drive that any firmware knows."""
        yield from _file(fd)
        yield from ("-blockdev", ",".join(_plain(ISO, OpenDisk(fd, DiskFormat.RAW), True)))
        bus = self._hardware.disk
        if bus in (DiskBus.VIRTIO, DiskBus.NVME):
            bus = self._common_bus()
        yield from self._place(bus, "cd", f"drive={ISO},bootindex={self._boots}")

    def _bus_of_drives(self) -> DiskBus:
        """Return where the drives are for CDs that configure the guest.

        A cloud's kernel has no driver for SATA, and one for virtio. Windows has one for SATA in any case."""
        bus = self._hardware.disk
        if bus in (DiskBus.VIRTIO, DiskBus.NVME):
            return self._common_bus() if self._hardware.hyperv else DiskBus.SCSI
        return bus

    def _common_bus(self) -> DiskBus:
        return DiskBus.SATA if self._hardware.chipset is Chipset.Q35 else DiskBus.IDE

    def _place(self, bus: DiskBus, kind: str, options: str) -> Iterator[str]:
        # By default QEMU halts a VM when its disk is full on the node, and then nothing in it answers.
        reports = "werror=report,rerror=report"
        if bus is DiskBus.VIRTIO:
            yield from ("-device", f"virtio-blk-pci,{options},{reports}")
        elif bus is DiskBus.NVME:
            yield from ("-device", f"nvme,{options}")
        elif bus is DiskBus.SCSI:
            yield from (
                "-device",
                f"scsi-{kind},bus={_OWN_SCSI}.0,scsi-id={self._scsi},{options},{reports}",
            )
            self._scsi += 1  # BIOS waits seconds for an empty drive that has a LUN other than 0
        elif bus is DiskBus.IDE:
            channel, unit = divmod(self._ide, 2)
            yield from ("-device", f"ide-{kind},bus=ide.{channel},unit={unit},{options},{reports}")
            self._ide += 1
        else:
            yield from self._on_sata(f"ide-{kind}", f"{options},{reports}")

    def _on_sata(self, device: str, options: str) -> Iterator[str]:
        controller, port = divmod(self._sata, _SATA_PLACES)
        built_in = controller == 0 and self._hardware.chipset is Chipset.Q35
        bus = "ide" if built_in else f"sata{controller}"
        if port == 0 and not built_in:
            yield from ("-device", f"ich9-ahci,id={bus}")
        yield from ("-device", f"{device},bus={bus}.{port},{options}")
        self._sata += 1


def _layers(disk: ImageDisk) -> Iterator[str]:
    """Return the options of a disk's node: all formats are given, and none is ever guessed."""
    yield from _plain(disk.name, disk.top, disk.read_only)
    if not disk.read_only:
        yield from ("discard=unmap", "detect-zeroes=unmap")
    if not disk.kept:
        yield "cache.no-flush=on"  # there is nothing to gain by flushing what is deleted with the VM
    if disk.base is not None:
        yield f"backing.driver={disk.base.format.value}"
        yield from _node("backing.", disk.base, True)


def _plain(name: str, file: OpenDisk, read_only: bool) -> Iterator[str]:
    yield from (f"driver={file.format.value}", f"node-name={name}")
    yield from _node("", file, read_only)


def _node(prefix: str, file: OpenDisk, read_only: bool) -> Iterator[str]:
    mode = f"read-only={'on' if read_only else 'off'}"
    yield f"{prefix}{mode}"
    if file.direct:
        yield f"{prefix}cache.direct=on"
    inner = f"{prefix}file."
    yield f"{inner}driver={'host_device' if file.block_device else 'file'}"
    # No locks of QEMU's own: what one VM alone may have is locked by the daemon.
    yield from (f"{inner}filename={_path(file.fd)}", f"{inner}{mode}", f"{inner}auto-read-only=off")
    yield f"{inner}locking=off"


def _file(fd: int) -> list[str]:
    return ["-add-fd", f"fd={fd},set={fd}"]


def _path(fd: int) -> str:
    return f"/dev/fdset/{fd}"


def _escaped(value: str) -> str:
    return value.replace(",", ",,")
