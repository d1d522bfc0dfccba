# SPDX-License-Identifier: Apache-2.0
"""The sizes of pods' VMs beyond the template: processors, memory and disk."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from infranetes.providers.annotations import PREFIX
from infranetes.providers.interface import Size
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import BLOCK_MIB, MIB, QemuSettings, round_up_to_block
from infranetes_common.errors import FailedPrecondition, InvalidArgument

MEMORY = "more"  # the prefix of the names that QEMU's objects for such memory have
_LEAST_MACHINE_MIB = 16


def memory_names(number: int) -> tuple[str, str]:
    """Return the names of a piece of memory: of the device, and of the object that is its memory."""
    return f"dimm{number}", f"{MEMORY}{number}" if number else MEMORY


@attrs.frozen
class Hotplug:
    """The hardware that is plugged into a clone beyond the template's size."""

    cpus: int  # in addition to the one that is there from the start
    memory_mib: int

    @property
    def pieces(self) -> Sequence[int]:
        """The memory's pieces in MiB, smallest first: a running VM can give back a quarter of it."""
        blocks = self.memory_mib // BLOCK_MIB
        half = -(-blocks // 2)
        quarter = -(-(blocks - half) // 2)
        return sorted(count * BLOCK_MIB for count in (half, quarter, blocks - half - quarter) if count)

    def __str__(self) -> str:
        return f"{self.memory_mib} MiB and {self.cpus} processors more"


def needed_overhead(template: CommandLine, settings: QemuSettings) -> int:
    """Bytes that a VM takes of the node beyond what its pod asks for: the guest's own need, and QEMU's."""
    return settings.guest_memory + _beside(template, settings)


def _beside(template: CommandLine, settings: QemuSettings) -> int:
    """Bytes of the node's memory that are not memory of the VM."""
    code = template.code_mib * MIB if template.accelerator == "tcg" else 0
    return settings.host_memory + code


def hotplug_for(template: CommandLine, size: Size, settings: QemuSettings) -> Hotplug:
    """Return what hardware a clone of `template` lacks for `size`, without processors beyond the node's.

    The guest's own need is on top of the pod's. What is left of a larger overhead is the guest's too.

    :raise InvalidArgument: more memory than a VM can have.
    """
    if min(size.cpu_millis, size.memory_bytes, size.overhead_bytes, size.huge_bytes) < 0:
        raise InvalidArgument(f"a VM of {size.cpu_millis} mCPU and {size.all_bytes} bytes can't be")
    cpus = min(max(1, -(-size.cpu_millis // 1000)), template.max_cpus)
    own = _own(template, size, settings)
    usual = size.memory_bytes + own if size.memory_bytes else template.memory_mib * MIB
    memory_mib = -(-(usual + size.huge_bytes) // MIB)
    more = round_up_to_block(max(0, memory_mib - template.memory_mib))
    most = max(template.max_memory_mib, template.memory_mib) + BLOCK_MIB
    if more and template.memory_mib + more > most:
        raise InvalidArgument(
            f"a pod of {size.all_bytes // MIB} MiB needs a VM of {memory_mib} MiB; the most that this node "
            f"gives is {template.max_memory_mib} MiB (providers.qemu.max_memory)"
        )
    return Hotplug(cpus - 1, more)


def lacking(template: CommandLine, has: Hotplug, size: Size, settings: QemuSettings) -> Hotplug:
    """Return what a VM that begins with `has` beyond the template's hardware lacks for `size`.

    :raise InvalidArgument: as `hotplug_for`.
    :raise FailedPrecondition: it lacks something, and has more than the template already."""
    needed = hotplug_for(template, size, settings)
    if has == Hotplug(0, 0):
        return needed
    if needed.cpus > has.cpus or needed.memory_mib > has.memory_mib:
        raise FailedPrecondition(
            f"the pod needs a VM with {needed}, and the kept one has {has}: keep one of a pod that asks for "
            "as much"
        )
    return Hotplug(0, 0)


def memory_for_pod(template: CommandLine, has: Hotplug, size: Size, settings: QemuSettings) -> int:
    """Return how many bytes of its memory a VM with the hardware `has` leaves to its pod."""
    whole = (template.memory_mib + has.memory_mib) * MIB
    return max(0, whole - _own(template, size, settings) - size.huge_bytes)


def _own(template: CommandLine, size: Size, settings: QemuSettings) -> int:
    """Bytes of the VM's memory for the guest's own need."""
    return max(settings.guest_memory, size.overhead_bytes - _beside(template, settings))


def disk_size(template: CommandLine, requested: int, most: int) -> int:
    """Bytes of the disk for a pod that asks for `requested` bytes; 0: it does not ask.

    :raise InvalidArgument: less than the template's, or more than `most`.
    """
    least = template.disk_mib * MIB
    if requested and not least <= requested <= max(least, most):
        raise InvalidArgument(
            f"annotation {PREFIX}disk: {requested >> 20}Mi: disks of this node's VMs have "
            f"{template.disk_mib}Mi at least and {max(least, most) >> 20}Mi at most "
            "(providers.qemu.disk, max_disk)"
        )
    return requested or least


@attrs.frozen
class MachineSize:
    """The size of a VM that boots an image, which it has from the start."""

    cpus: int
    memory_mib: int


def machine_size(line: CommandLine, size: Size, settings: QemuSettings) -> MachineSize:
    """Return how large a VM that boots an image is. What the pod asks for is the machine's whole memory.

    :raise InvalidArgument: such a VM can't be, or is larger than one may be.
    """
    if min(size.cpu_millis, size.memory_bytes, size.overhead_bytes, size.huge_bytes) < 0:
        raise InvalidArgument(f"a VM of {size.cpu_millis} mCPU and {size.all_bytes} bytes can't be")
    cpus = min(max(1, -(-size.cpu_millis // 1000)), line.max_cpus)
    usual = size.memory_bytes or line.memory_mib * MIB
    memory_mib = (usual + size.huge_bytes) // MIB
    most = max(line.max_memory_mib, line.memory_mib)
    if not _LEAST_MACHINE_MIB <= memory_mib <= most:
        raise InvalidArgument(
            f"a VM of {memory_mib} MiB can't boot an image: {_LEAST_MACHINE_MIB} MiB at least, and the most "
            f"that this node gives is {most} MiB (providers.qemu.max_memory)"
        )
    return MachineSize(cpus, memory_mib)


def machine_overhead(line: CommandLine, settings: QemuSettings) -> int:
    """Bytes that such a VM takes of the node beyond what its pod asks for: QEMU's own."""
    return _beside(line, settings)
