"""QEMU's command line: one machine, whether it is the template or a copy of it.

QEMU starts as a user without rights, with every system call denied that it does not need, and can
open no file by itself: whatever it may have is handed to it as an open descriptor. What a machine is
made of has to be the same for the template and its copies, or they could not take over its state.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from infranetes.providers.interface import Size
from infranetes.providers.qemu.settings import MIB
from infranetes_common.bundle import SERIAL
from infranetes_common.errors import InvalidArgument

IDENTITY_PORT = "infranetes.identity"
TEMPLATE_MAC = "0a:58:00:00:00:00"  # each copy gets its own from the guest's side
NIC, NETDEV, LINK = "nic0", "net0", "net0"
_BLOCK_MIB = 128  # what x86 guests take memory in

# SHA-256 is five times and ECDSA twice as fast without AVX, as measured under QEMU 7.2.
_CPUS = {"kvm": "host", "tcg": "max,-avx,-avx2"}

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class Fd(enum.IntEnum):
    """The numbers of what QEMU is handed."""

    RAM = 3
    STATE = 4
    DISK = 5
    TEMPLATE_DISK = 6
    IMAGE_DISK = 7
    KERNEL = 8
    INITRD = 9
    CONSOLE = 10
    TAP = 11
    QMP = 12
    IDENTITY = 13
    IMAGES = 14


@attrs.frozen
class Machine:
    """What template and copies have in common. Memory in MiB."""

    qemu: str  # path of the program
    version: str  # its own words
    accelerator: str  # kvm or tcg
    memory_mib: int
    max_memory_mib: int
    max_cpus: int
    cpu_model: str = ""
    preload: str = ""  # the key of the images that are loaded into the template; "": none

    @property
    def cpu(self) -> str:
        """QEMU's name of the processor's model, with features."""
        return self.cpu_model or _CPUS[self.accelerator]

    def kernel_arguments(self) -> str:
        """What the guest's kernel is booted with."""
        words = [
            "root=/dev/vda rw console=ttyS0 quiet fsck.mode=skip net.ifnames=0",
            "panic=-1",  # a broken machine ends at once
            "apparmor=1 security=apparmor",
            "memhp_default_state=online memory_hotplug.memmap_on_memory=1",
            "nowatchdog",  # a copy wakes up with a clock that has jumped
            "random.trust_cpu=on",
        ]
        if self.accelerator == "tcg":
            words.append("mitigations=off")  # emulated processors do not speculate
        return " ".join(words)

    def template(self) -> list[str]:
        """The arguments of the machine that is booted once."""
        return [*self._common("share=on"), *_disk(Fd.DISK, Fd.IMAGE_DISK), *self._devices(), "-S"]

    def copy(self) -> list[str]:
        """The arguments of a machine that waits for the template's state."""
        return [
            *self._common("share=off"),
            *_disk(Fd.DISK, Fd.TEMPLATE_DISK, Fd.IMAGE_DISK),
            *self._devices(),
            *("-S", "-incoming", "defer"),
        ]

    def _common(self, share: str) -> list[str]:
        memory = f"size={self.memory_mib}M"
        if self.max_memory_mib > self.memory_mib:
            memory += f",slots=1,maxmem={_round_up(self.max_memory_mib) + _BLOCK_MIB}M"
        cpus = "cpus=1"
        if self.max_cpus > 1:
            cpus += f",maxcpus={self.max_cpus},sockets=1,cores={self.max_cpus},threads=1"
        ram = f"memory-backend-file,id=ram,size={self.memory_mib}M,mem-path={_path(Fd.RAM)},{share}"
        return [
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-sandbox", SANDBOX),
            *("-machine", f"q35,accel={self.accelerator},memory-backend=ram,hpet=off,vmport=off"),
            *("-cpu", self.cpu, "-smp", cpus, "-m", memory, "-object", ram),
            *("-kernel", _path(Fd.KERNEL), "-initrd", _path(Fd.INITRD)),
            *("-append", self.kernel_arguments()),
        ]

    def _devices(self) -> list[str]:
        return [
            *("-chardev", f"file,id=console,path={_path(Fd.CONSOLE)},append=on"),
            *("-serial", "chardev:console"),
            *("-device", "virtio-serial-pci"),
            *("-chardev", f"socket,id=identity,fd={Fd.IDENTITY:d},server=on,wait=off"),
            *("-device", f"virtserialport,chardev=identity,name={IDENTITY_PORT}"),
            *("-netdev", f"tap,id={NETDEV},fd={Fd.TAP:d}"),
            *("-device", f"virtio-net-pci,id={NIC},netdev={NETDEV},mac={TEMPLATE_MAC},romfile="),
            *("-device", "virtio-rng-pci"),
            *("-chardev", f"socket,id=qmp,fd={Fd.QMP:d},server=on,wait=off"),
            *("-mon", "chardev=qmp,mode=control"),
            *(_images() if self.preload else ()),
        ]

    def cpu_device(self, number: int) -> dict[str, object]:
        """`device_add`'s arguments for the processor `number`, the first of all being 0."""
        return {
            "driver": f"{self.cpu.partition(',')[0]}-x86_64-cpu",
            "id": f"cpu{number}",
            "socket_id": 0,
            "core_id": number,
            "thread_id": 0,
        }


@attrs.frozen
class Growth:
    """What a copy gets plugged in beyond the template's size."""

    cpus: int  # beside the one that is there
    memory_mib: int

    def __str__(self) -> str:
        return f"{self.memory_mib} MiB and {self.cpus} processors more"


def growth(machine: Machine, size: Size, guest_memory_mib: int) -> Growth:
    """What `machine` lacks for `size`.

    :raise InvalidArgument: more memory than it can have; fewer processors than asked for are no error.
    """
    if size.cpu_millis < 0 or size.memory_bytes < 0:
        raise InvalidArgument(f"a VM of {size.cpu_millis} mCPU and {size.memory_bytes} bytes can't be")
    cpus = min(max(1, -(-size.cpu_millis // 1000)), machine.max_cpus)
    wanted = -(-size.memory_bytes // MIB) + guest_memory_mib if size.memory_bytes else 0
    memory = _round_up(max(0, wanted - machine.memory_mib))
    if memory and machine.memory_mib + memory > max(machine.max_memory_mib, machine.memory_mib) + _BLOCK_MIB:
        raise InvalidArgument(
            f"a pod of {size.memory_bytes // MIB} MiB needs a VM of {wanted} MiB; the most that this node "
            f"gives is {machine.max_memory_mib} MiB (providers.qemu.max_memory_mib)"
        )
    return Growth(cpus - 1, memory)


User = tuple[int, int, list[int]]
"""Whom QEMU runs as: user, group, other groups."""


def unprivileged(
    command: Sequence[str], uid: int, gid: int, groups: Sequence[int], *, tied: bool
) -> list[str]:
    """`command` in a session of its own, as that user and with no capability at all.

    :param tied: whether it dies with the process that starts it.
    """
    drop = ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    who = [f"--reuid={uid}", f"--regid={gid}"]
    who.append(f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups")
    death = ["--pdeathsig=KILL"] if tied else []
    return ["setsid", "setpriv", *who, *drop, *death, *command]


def _path(fd: Fd) -> str:
    return f"/proc/self/fd/{fd:d}"


def _disk(*layers: Fd) -> list[str]:
    """A disk of qcow2 layers over the image's raw one, uppermost first."""
    options = ["driver=qcow2", "node-name=disk", "discard=unmap"]
    prefix = ""
    for layer in layers:
        if prefix:
            options.append(f"{prefix}driver={'raw' if layer is Fd.IMAGE_DISK else 'qcow2'}")
        options += [f"{prefix}file.driver=file", f"{prefix}file.filename={_path(layer)}"]
        prefix += "backing."
    # The disk lives no longer than the VM: nothing is gained by waiting for it to be on the medium.
    options += ["cache.no-flush=on", "detect-zeroes=unmap"]
    device = "virtio-blk-pci,drive=disk,werror=report,rerror=report"
    return ["-blockdev", ",".join(options), "-device", device]


def _round_up(mebibytes: int) -> int:
    return -(-mebibytes // _BLOCK_MIB) * _BLOCK_MIB


def _images() -> list[str]:
    """The disk of images that the template's agent loads. A copy has it too: devices have to be the same."""
    drive = f"driver=raw,node-name=images,read-only=on,file.driver=file,file.filename={_path(Fd.IMAGES)}"
    return ["-blockdev", drive, "-device", f"virtio-blk-pci,drive=images,serial={SERIAL}"]


def inputs(machine: Machine, image_key: str) -> list[str]:
    """All that a template is made of, for its key."""
    return [image_key, machine.version, machine.preload, *machine.template(), *machine.copy()]
