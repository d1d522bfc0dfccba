# SPDX-License-Identifier: Apache-2.0
"""The hardware of a VM that is kept, as its QEMU tells it.

Its state can be loaded only where each device is as it was, at the same place. The template's key stands for
what all of its clones have in common: the version of QEMU, the guest image, the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.disks import entries, node_id, shown_disks
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.qemu.vm.sizes import Hotplug
from infranetes_common.errors import Unavailable

_CORE = "core-id"
Answer: TypeAlias = Mapping[str, object]


@attrs.frozen
class Piece:
    """Memory that was plugged in. :ivar address: in the guest."""

    device: str
    memory: str  # the name of its memory object
    address: int
    slot: int
    mib: int


@attrs.frozen
class Disk:
    """A disk that was shown. :ivar size: bytes. :ivar path: of its file; "": not known."""

    name: str
    target: int
    lun: int
    size: int
    path: str = ""


@attrs.frozen
class Hardware:
    """What a VM had. :ivar template: the key of its template. :ivar disk: the size of its disk, in bytes."""

    version: str
    accelerator: str
    image: str
    template: str
    memory_mib: int  # without what was plugged in
    disk: int
    template_made_at: str = ""  # see `Template.made_at`; "": not known
    cores: tuple[int, ...] = ()  # of processors that were plugged in
    pieces: tuple[Piece, ...] = ()
    disks: tuple[Disk, ...] = ()

    @property
    def memory(self) -> int:
        """All of its memory, in bytes."""
        return (self.memory_mib + sum(piece.mib for piece in self.pieces)) * MIB

    @property
    def more(self) -> Hotplug:
        """What was plugged in."""
        return Hotplug(len(self.cores), sum(piece.mib for piece in self.pieces))

    @property
    def emulated(self) -> bool:
        """Whether its processors are emulated."""
        return self.accelerator == "tcg"

    def described(self) -> Mapping[str, str]:
        """Return it for a manifest."""
        return {
            "hypervisor": f"QEMU {self.version}",
            "accelerator": self.accelerator,
            "memory": str(self.memory),
            "processors": str(1 + len(self.cores)),
            "guest-image": self.image,
            "template": self.template,
        }

    def encode(self) -> bytes:
        """Return it as JSON."""
        return (json.dumps(attrs.asdict(self), indent=1) + "\n").encode()


def decode(content: bytes) -> Hardware:
    """Return what `Hardware.encode` has encoded. :raise ValueError: it is something else."""
    try:
        fields = json.loads(content)
        fields["cores"] = tuple(int(core) for core in fields["cores"])
        fields["pieces"] = tuple(Piece(**piece) for piece in fields["pieces"])
        fields["disks"] = tuple(Disk(**disk) for disk in fields["disks"])
        return Hardware(**fields)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not the hardware of a VM: {error}") from None


async def add_plugged(qmp: QmpConnection, hardware: Hardware, line: CommandLine) -> None:
    """Plug what a kept VM had into a QEMU that waits for its state, except for disks.

    :raise InfranetesError: QEMU refuses."""
    for core in hardware.cores:
        await qmp.execute("device_add", **line.cpu_device(core))
    for piece in hardware.pieces:
        size = piece.mib * MIB
        await qmp.execute("object-add", qom_type="memory-backend-ram", id=piece.memory, size=size)
        place = {"memdev": piece.memory, "addr": piece.address, "slot": piece.slot}
        await qmp.execute("device_add", driver="pc-dimm", id=piece.device, **place)


async def read(qmp: QmpConnection, record: VmRecord, shown: Path) -> Hardware:
    """Ask QEMU.

    :param shown: see `VmPaths.shown`.
    :raise Unavailable: its answers make no sense. :raise InfranetesError: it does not answer."""
    version = await qmp.execute("query-version")
    summary = await qmp.execute("query-memory-size-summary")
    plugged = await qmp.execute("query-memory-devices")
    emulated = not (await qmp.execute("query-kvm"))["enabled"]
    processors = await qmp.execute("query-hotpluggable-cpus")
    devices = entries(await qmp.execute("qom-list", path="/machine/peripheral"))
    nodes = entries(await qmp.execute("query-named-block-nodes", flat=True))
    try:
        numbers = version["qemu"]
        release = ".".join(str(int(numbers[part])) for part in ("major", "minor", "micro"))
        sizes = {str(node["node-name"]): _size(node) for node in nodes}
        disks = shown_disks(devices)
        return Hardware(
            version=f"{release} {str(version.get('package', ''))[:100]}".strip(),
            accelerator="tcg" if emulated else "kvm",
            image=record.image,
            template=record.template,
            memory_mib=int(summary["base-memory"]) // MIB,
            disk=sizes["disk"],
            template_made_at=record.template_made_at,
            cores=_cores(processors),
            pieces=tuple(_piece(each["data"]) for each in plugged),
            disks=tuple(
                Disk(disk.name, disk.target, disk.lun, sizes[node_id(disk)], _file(shown / disk.name))
                for disk in disks
            ),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"VM {record.id} does not say what hardware it has: {error!s:.200}") from None


def _cores(places: Sequence[Mapping[str, Mapping[str, int]]]) -> tuple[int, ...]:
    cores = [int(place["props"][_CORE]) for place in places if "qom-path" in place]
    return tuple(sorted(core for core in cores if core))


def _piece(data: Mapping[str, str]) -> Piece:
    return Piece(
        device=str(data["id"]),
        memory=str(data["memdev"]).rpartition("/")[2],
        address=int(data["addr"]),
        slot=int(data["slot"]),
        mib=int(data["size"]) // MIB,
    )


def _file(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _size(node: Answer) -> int:
    image = node.get("image")
    size = image.get("virtual-size") if isinstance(image, dict) else None
    if not isinstance(size, int):
        raise TypeError("a disk without a size")
    return size
