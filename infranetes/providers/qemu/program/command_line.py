# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line, for the template and for its clones.

QEMU starts as a user without rights, with every system call denied that it does not need, and can open no
file by itself: it inherits an open descriptor of each file that it may use. The virtual hardware has to be
the same for the template and its clones, or they could not load its state.
"""

from __future__ import annotations

import enum

import attrs

from infranetes.providers.qemu.settings import BLOCK_MIB, round_up_to_block
from infranetes_common.image_bundle import SERIAL

IDENTITY_PORT, AGENT_PORT = "infranetes.identity", "infranetes.agent"
TEMPLATE_MAC = "0a:58:00:00:00:00"  # in a clone, the guest sets the clone's own
NIC, NETDEV, LINK = "nic0", "net0", "net0"
SLOTS = 16  # for memory beyond the template's, which a VM gets in pieces
SCSI = "scsi0"  # the controller of the disks that running VMs are shown

# Measured under QEMU 7.2, per second of its CPU: without AVX, SHA-256 is five times and ECDSA twice as fast.
# Without ERMS, which makes Linux and the C library copy and clear memory by the byte, and with four levels of
# page tables instead of five, TCP carries twice as much, and 16 KiB are cleared 13 times as fast. FSRM does
# for short copies what ERMS does; later releases have it too, and with it Linux 6.1 never boots in QEMU 10.
_CPU_MODELS = {"kvm": "host", "tcg": "max,-avx,-avx2,-erms,-fsrm,-la57"}

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


_WAITS = ("-S", "-incoming", "defer")
_DISK_DEVICE = ("-device", "virtio-blk-pci,drive=disk,werror=report,rerror=report")


class Fd(enum.IntEnum):
    """The numbers of the descriptors that QEMU inherits."""

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
    AGENT = 15
    KEPT_DISK = 16


@attrs.frozen
class CommandLine:
    """The virtual hardware that the template and its clones have in common. Memory and disk in MiB."""

    qemu: str  # path of the program
    version: str  # as the program states it
    accelerator: str  # kvm or tcg
    memory_mib: int
    max_memory_mib: int
    max_cpus: int
    cpu_model: str = ""
    preload: str = ""  # the key of the images that are loaded into the template; "": none
    disk_mib: int = 20 << 10
    code_mib: int = 96  # the buffer for translated code, only used under tcg

    @property
    def cpu(self) -> str:
        """The processor model, with features, as QEMU names it."""
        return self.cpu_model or _CPU_MODELS[self.accelerator]

    def kernel_arguments(self) -> str:
        """The arguments that the guest's kernel is booted with."""
        words = [
            "root=/dev/vda rw console=ttyS0 quiet fsck.mode=skip net.ifnames=0",
            "loglevel=5",  # the kernel's warnings reach the console, which journald does not read
            "panic=-1",  # a VM whose kernel panics ends at once
            "apparmor=1 security=apparmor",
            "memhp_default_state=online memory_hotplug.memmap_on_memory=1",
            # Plugged-in memory can be given back only where the kernel keeps nothing of its own. That is
            # possible for up to four times the memory that it has from the start; beyond that, its own data
            # would have too little room.
            "memory_hotplug.online_policy=auto-movable memory_hotplug.auto_movable_ratio=400",
            "nowatchdog",  # because a clone wakes up with a clock that has jumped
            "random.trust_cpu=on",
            # A write to a page of 2 MiB unshares all of it: 512 pages of the node that no clone shares any
            # more.
            "transparent_hugepage=madvise",
            # Memory above 4 GiB may be plugged in; bounce buffers serve devices that can't reach it: there
            # are none.
            "swiotlb=noforce",
        ]
        if self.accelerator == "tcg":
            words.append("mitigations=off")  # emulated processors do not speculate
            # The kernel counts the timer's interrupts for a moment, and panics when an emulated processor
            # was not run meanwhile, as happens on a busy node.
            words.append("no_timer_check")
        return " ".join(words)

    def template_arguments(self) -> list[str]:
        """Arguments for the template, which is booted once."""
        return [
            *self._common("share=on"),
            *_disk(Fd.DISK, Fd.IMAGE_DISK),
            *self._devices(),
            "-S",
            *self._boot(),
        ]

    def clone_arguments(self, kept: bool = False) -> list[str]:
        """Arguments for a clone, which waits for the template's state. :param kept: for that of a kept VM."""
        layers = (Fd.DISK, *((Fd.KEPT_DISK,) if kept else ()), Fd.TEMPLATE_DISK, Fd.IMAGE_DISK)
        return [
            *self._common("share=off"),
            *_disk(*layers),
            *self._devices(),
            *_WAITS,
        ]

    def loader_arguments(self, disk: int) -> list[str]:
        """Arguments for a QEMU that waits for a kept VM's state, and has its memory in a file.

        :param disk: the size of the VM's disk in bytes. Nothing is read of it, so there is none."""
        drive = f"driver=null-co,node-name=disk,size={disk},read-zeroes=on"
        return [*self._common("share=on"), "-blockdev", drive, *_DISK_DEVICE, *self._devices(), *_WAITS]

    def template_inputs(self, image_key: str) -> list[str]:
        """Everything that a template depends on, for its key."""
        disk = f"disk {self.disk_mib}"
        arguments = [*self.template_arguments(), *self.clone_arguments()]
        return [image_key, self.version, self.preload, disk, *arguments]

    def _common(self, share: str) -> list[str]:
        memory = f"size={self.memory_mib}M"
        if self.max_memory_mib > self.memory_mib:
            memory += f",slots={SLOTS},maxmem={round_up_to_block(self.max_memory_mib) + BLOCK_MIB}M"
        cpus = "cpus=1"
        if self.max_cpus > 1:
            cpus += f",maxcpus={self.max_cpus},sockets=1,cores={self.max_cpus},threads=1"
        ram = f"memory-backend-file,id=ram,size={self.memory_mib}M,mem-path={_path(Fd.RAM)},{share}"
        return [
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-sandbox", SANDBOX),
            *(
                "-machine",
                "q35,memory-backend=ram,hpet=off,vmport=off",
                "-accel",
                self.accelerator_argument(),
            ),
            *("-cpu", self.cpu, "-smp", cpus, "-m", memory, "-object", ram),
        ]

    def accelerator_argument(self) -> str:
        """Return the argument of -accel."""
        if self.accelerator == "tcg":
            return f"tcg,tb-size={self.code_mib}"
        return self.accelerator

    def _boot(self) -> list[str]:
        """Return the arguments of direct kernel boot. Clones do without: they have the kernel in memory, and
        QEMU would hold a second copy."""
        return [
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
            *("-chardev", f"socket,id=agent,fd={Fd.AGENT:d},server=on,wait=off"),
            *("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
            *("-netdev", f"tap,id={NETDEV},fd={Fd.TAP:d}"),
            *("-device", f"virtio-net-pci,id={NIC},netdev={NETDEV},mac={TEMPLATE_MAC},romfile="),
            *("-device", "virtio-rng-pci"),
            # Two queues, since with one the guest gives each disk a scheduler with requests of its own. No
            # events for disks that come and go, as a guest loses those after the eighth: its agent looks
            # where the node says.
            *("-device", f"virtio-scsi-pci,id={SCSI},num_queues=2,hotplug=off"),
            *("-global", "scsi-hd.rotation_rate=1"),  # no disk rotates
            *("-chardev", f"socket,id=qmp,fd={Fd.QMP:d},server=on,wait=off"),
            *("-mon", "chardev=qmp,mode=control"),
            *(_preloaded_images() if self.preload else ()),
        ]

    def cpu_device(self, number: int) -> dict[str, object]:
        """`device_add`'s arguments for the processor `number`; the one that is there from the start is 0."""
        return {
            "driver": f"{self.cpu.partition(',')[0]}-x86_64-cpu",
            "id": f"cpu{number}",
            "socket_id": 0,
            "core_id": number,
            "thread_id": 0,
        }


def _path(fd: Fd) -> str:
    return f"/proc/self/fd/{fd:d}"


def _disk(*layers: Fd) -> list[str]:
    """Return a disk of qcow2 layers over the image's raw one, topmost first."""
    options = ["driver=qcow2", "node-name=disk", "discard=unmap"]
    files = []
    prefix = ""
    for layer in layers:
        if prefix:
            options.append(f"{prefix}driver={'raw' if layer is Fd.IMAGE_DISK else 'qcow2'}")
        path = _path(layer)
        if layer is Fd.KEPT_DISK:  # QEMU's user may not open it again
            files = ["-add-fd", f"fd={layer:d},set={layer:d}"]
            path = f"/dev/fdset/{layer:d}"
        options += [f"{prefix}file.driver=file", f"{prefix}file.filename={path}"]
        prefix += "backing."
    # The disk is deleted with the VM, so there is nothing to gain by flushing it to the medium.
    options += ["cache.no-flush=on", "detect-zeroes=unmap"]
    return [*files, "-blockdev", ",".join(options), *_DISK_DEVICE]


def _preloaded_images() -> list[str]:
    """Return the disk of images that the template's agent loads; clones have it to have the same devices."""
    drive = f"driver=raw,node-name=images,read-only=on,file.driver=file,file.filename={_path(Fd.IMAGES)}"
    return ["-blockdev", drive, "-device", f"virtio-blk-pci,drive=images,serial={SERIAL}"]
