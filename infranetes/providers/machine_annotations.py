# SPDX-License-Identifier: Apache-2.0
"""The annotations of pods whose image is the VM: its virtual hardware, and what its guest is told.

They are refused for other pods. A test compares the table in docs/annotations.md with this one.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs

from infranetes.providers.annotation_rows import PREFIX, Annotation, boolean, fields, matching
from infranetes.providers.machine_images import BaseDisk, Chipset, DiskBus, Firmware, Hardware, NicModel
from infranetes_common.errors import InvalidArgument
from infranetes_common.ssh_keys import authorized_key

MAX_DOCUMENT = 256 * 1024  # characters; Kubernetes allows all annotations of a pod so much
MAX_KEYS = 64


class GuestWay(enum.Enum):
    """A way into a guest."""

    AGENT = "agent"  # ours
    SSH = "ssh"
    GUEST_AGENT = "guest-agent"  # QEMU's
    NONE = "none"  # the hypervisor alone


class CloudInit(enum.Enum):
    """The form in which a guest is told of itself by a CD."""

    NOCLOUD = "nocloud"
    CONFIG_DRIVE = "configdrive"
    NONE = "none"


class NetworkConfig(enum.Enum):
    """How a guest is told its addresses."""

    DHCP = "dhcp"
    STATIC = "static"


class Root(enum.Enum):
    """What becomes of a persistent root that was made of another image."""

    KEEP = "keep"
    REPLACE = "replace"


class Preset(enum.Enum):
    """Hardware and habits of a family of systems."""

    LINUX = "linux"
    WINDOWS = "windows"
    LEGACY = "legacy"


@attrs.frozen
class MountedFile:
    """A file of a volume that the pod mounts, by its path in the container."""

    path: str


@attrs.frozen
class ObjectKey:
    """A key of a ConfigMap or Secret of the pod's namespace."""

    kind: str  # configmap or secret
    name: str
    key: str = ""  # "": all of them


Source = MountedFile | ObjectKey


@attrs.frozen
class GuestChoices:
    """What a pod says of its guest.

    The guest gets the documents of user-data and its source, and what Infranetes adds to them, as one."""

    guest: GuestWay | None = None  # None: what is there
    cloud_init: CloudInit = CloudInit.NOCLOUD
    network_config: NetworkConfig = NetworkConfig.DHCP
    windows: bool = False  # the guest is to be spoken to as a Windows
    user_data: str = attrs.field(default="", repr=False)
    user_data_source: Source | None = None
    user_data_base64: bool = False  # of the source
    user_data_alone: bool = False  # nothing is added
    meta_data: str = ""  # YAML, a mapping: beside ours, and before ours
    ssh_keys: tuple[str, ...] = ()  # lines of an authorized_keys file
    ssh_keys_source: Source | None = None
    sysprep: str = ""  # a directory that the pod mounts, for a CD beside; "": none
    root: Root = Root.KEEP

    @property
    def objects(self) -> frozenset[tuple[str, str]]:
        """The ConfigMaps and Secrets that it names and the pod need not mount, by kind and name."""
        sources = (self.user_data_source, self.ssh_keys_source)
        return frozenset((each.kind, each.name) for each in sources if isinstance(each, ObjectKey))


@attrs.frozen
class MachineChoices:
    """What a pod says of its VM and its guest."""

    guest: GuestChoices = GuestChoices()
    hardware: Hardware = attrs.field(factory=Hardware)
    firmware: Firmware | None = None  # as the pod says; None: what the image boots by

    def hardware_for(self, base: BaseDisk) -> Hardware:
        """Return the hardware for an image.

        :raise InvalidArgument: the pod asks for a firmware that can't boot it."""
        if self.firmware is None:
            firmware = self.hardware.firmware
            if base.boots_by_bios != base.boots_by_uefi:
                firmware = Firmware.UEFI if base.boots_by_uefi else Firmware.BIOS
            return attrs.evolve(self.hardware, firmware=firmware)
        bios = self.firmware is Firmware.BIOS
        boots, other = base.boots_by_bios, base.boots_by_uefi
        if not bios:
            boots, other = other, boots
        if other and not boots:
            raise InvalidArgument(
                f"annotation {PREFIX}firmware: {self.firmware.value!r}: by its partition table the image "
                f"boots by {'UEFI' if bios else 'BIOS'} only; leave the annotation out, or take another image"
            )
        return attrs.evolve(self.hardware, firmware=self.firmware)


PRESETS = {
    Preset.LINUX: Hardware(),
    # What every Windows since 2016 has drivers for, and Windows 11 insists on.
    Preset.WINDOWS: Hardware(
        firmware=Firmware.UEFI, disk=DiskBus.SATA, nic=NicModel.E1000E, tpm=True, hyperv=True, local_time=True
    ),
    # What systems of around 2000 have drivers for.
    Preset.LEGACY: Hardware(chipset=Chipset.PC, disk=DiskBus.IDE, nic=NicModel.RTL8139),
}

_E = TypeVar("_E", bound=enum.Enum)


def _choice(name: str, field: str, kind: type[_E]) -> Annotation:
    values = [each.value for each in kind]

    def parse(text: str) -> _E:
        return kind(text)

    return Annotation(name, field, parse, f"{', '.join(values[:-1])} or {values[-1]}")


def _uuid(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F-]{32,36}", text):
        raise ValueError(text)
    return str(uuid.UUID(text))


def _text(text: str) -> str:
    if "\0" in text or not text.strip():
        raise ValueError
    return text


def _keys(text: str) -> tuple[str, ...]:
    return key_lines(f"annotation {PREFIX}ssh-keys", text)


def key_lines(what: str, text: str) -> tuple[str, ...]:
    """Return the keys of an authorized_keys file; lines that are empty or begin with # are comments.

    :raise InvalidArgument: a line is no key, or there are too many. :param what: begins its message."""
    found = []
    for number, line in enumerate(re.split(r"\r?\n", text), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                found.append(authorized_key(line))
            except ValueError as error:
                raise InvalidArgument(f"{what}: line {number}: {error}") from None
    if len(found) > MAX_KEYS:
        raise InvalidArgument(f"{what}: {len(found)} keys, over {MAX_KEYS}")
    return tuple(found)


_OBJECT = re.compile(
    r"(configmap|secret)/([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?)(?:/([-._a-zA-Z0-9]{1,253}))?"
)


def _path(text: str) -> str:
    if not re.fullmatch(r"/[^\0\r\n]{1,4095}", text) or ".." in text.split("/"):
        raise ValueError(text)
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def _source(text: str) -> Source:
    if text.startswith("/"):
        return MountedFile(_path(text))
    found = _OBJECT.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return ObjectKey(found[1], found[2], found[3] or "")


def _one_of(values: Mapping[str, bool]) -> Callable[[str], bool]:
    return values.__getitem__


_SOURCE_WORDS = "the path of a mounted file, or configmap/NAME/KEY or secret/NAME/KEY"
_BOOLEAN_WORDS = "true or false"
TABLE = (
    _choice("guest", "guest", GuestWay),
    _choice("cloud-init", "cloud_init", CloudInit),
    _choice("network-config", "network_config", NetworkConfig),
    Annotation(
        "user-data",
        "user_data",
        _text,
        "a document for cloud-init",
        most=MAX_DOCUMENT,
        exact=True,
        quoted=False,
    ),
    Annotation("user-data-source", "user_data_source", _source, _SOURCE_WORDS),
    Annotation(
        "user-data-encoding",
        "user_data_base64",
        _one_of({"plain": False, "base64": True}),
        "plain or base64",
    ),
    Annotation("user-data-alone", "user_data_alone", boolean, _BOOLEAN_WORDS),
    Annotation(
        "meta-data", "meta_data", _text, "a mapping in YAML", most=MAX_DOCUMENT, exact=True, quoted=False
    ),
    Annotation(
        "ssh-keys",
        "ssh_keys",
        _keys,
        "lines of an authorized_keys file",
        most=MAX_DOCUMENT,
        quoted=False,
    ),
    Annotation("ssh-keys-source", "ssh_keys_source", _source, _SOURCE_WORDS),
    Annotation("sysprep", "sysprep", _path, "the path of a mounted directory"),
    _choice("root", "root", Root),
    _choice("preset", "preset", Preset),
    _choice("firmware", "firmware", Firmware),
    _choice("chipset", "chipset", Chipset),
    _choice("disk-bus", "disk", DiskBus),
    _choice("nic", "nic", NicModel),
    Annotation("tpm", "tpm", boolean, _BOOLEAN_WORDS),
    Annotation("hyperv", "hyperv", boolean, _BOOLEAN_WORDS),
    Annotation("clock", "local_time", _one_of({"utc": False, "local": True}), "utc or local"),
    Annotation(
        "cpu-model",
        "cpu_model",
        matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
        "a model's name as QEMU has it, such as Haswell",
    ),
    Annotation("machine-uuid", "uuid", _uuid, "a UUID"),
    Annotation(
        "machine-serial",
        "serial",
        matching(r"[A-Za-z0-9](?:[A-Za-z0-9 ._:/+-]{0,62}[A-Za-z0-9])?"),
        "up to 64 letters, digits, spaces and . _ : / + -",
    ),
    Annotation("watchdog", "watchdog", boolean, _BOOLEAN_WORDS),
)


def read(annotations: Mapping[str, str]) -> MachineChoices:
    """Parse what the annotations of a pod say of its machine.

    :raise InvalidArgument: a value is malformed; the message names the annotation."""
    found = fields(TABLE, annotations)
    preset = found.pop("preset", Preset.LINUX)
    firmware = found.pop("firmware", None)
    parts = {name: found.pop(name) for name in list(found) if name in attrs.fields_dict(Hardware)}
    windows = preset is Preset.WINDOWS
    if windows:
        found.setdefault("cloud_init", CloudInit.CONFIG_DRIVE)
    return MachineChoices(
        guest=GuestChoices(windows=windows, **found),
        hardware=attrs.evolve(PRESETS[preset], **parts),
        firmware=firmware,
    )


def refuse_for_cloud(annotations: Mapping[str, str], provider: str, *, guests: bool) -> None:
    """Refuse what a pod can't have whose image is a VM that a cloud keeps.

    :param provider: the cloud's. :param guests: whether its images may be without our agent.
    :raise InvalidArgument: the message names the annotation."""
    names = {PREFIX + row.name for row in TABLE}
    served = {PREFIX + name for name in _AT_CLOUDS} if guests else set()
    for name in annotations:
        if name in names and name not in served:
            raise InvalidArgument(
                f"annotation {name} can't be served: {provider} boots images that it keeps itself; leave it "
                "out, or choose a RuntimeClass whose VMs run on the node"
            )
    if not guests:
        return
    choices = read(annotations).guest
    if choices.guest is GuestWay.GUEST_AGENT:
        raise InvalidArgument(
            f"annotation {PREFIX}guest: 'guest-agent': {provider} has no channel to QEMU's guest agent; take "
            "ssh or none"
        )
    if not without_agent(choices):
        for name in annotations:
            if name in served and name != f"{PREFIX}guest":
                raise InvalidArgument(
                    f"annotation {name} is for images without our agent, at {provider}: add "
                    f"{PREFIX}guest: ssh or none, or leave it out"
                )
        return
    if choices.cloud_init is CloudInit.CONFIG_DRIVE:
        raise InvalidArgument(
            f"annotation {PREFIX}cloud-init: 'configdrive': {provider} itself says how a guest finds its "
            "user-data; leave it out, or take none"
        )
    if choices.guest is GuestWay.SSH and choices.cloud_init is CloudInit.NONE:
        raise InvalidArgument(
            f"annotations {PREFIX}guest: ssh and {PREFIX}cloud-init: none: the guest learns the node's key "
            "by cloud-init; leave one of them out"
        )
    for name, source in (
        ("user-data-source", choices.user_data_source),
        ("ssh-keys-source", choices.ssh_keys_source),
    ):
        if source is not None and (isinstance(source, MountedFile) or source.kind != "configmap"):
            raise InvalidArgument(
                f"annotation {PREFIX}{name}: user-data can be read by whoever may see the VM at {provider}, "
                "so no Secret goes into it: name configmap/NAME/KEY; Secrets that the pod mounts reach the "
                "guest by SSH"
            )


def without_agent(choices: GuestChoices) -> bool:
    """Whether a pod says that a cloud's image is without our agent."""
    return choices.guest in (GuestWay.SSH, GuestWay.NONE)


# What a cloud's image without our agent may have.
_AT_CLOUDS = (
    "guest",
    "cloud-init",
    "user-data",
    "user-data-source",
    "user-data-encoding",
    "user-data-alone",
    "ssh-keys",
    "ssh-keys-source",
)


def refuse(annotations: Mapping[str, str]) -> None:
    """Refuse, for a pod of containers, what only a pod may have whose image is a VM.

    :raise InvalidArgument: the message names the annotation."""
    names = {PREFIX + row.name for row in TABLE}
    for name in annotations:
        if name in names:
            raise InvalidArgument(
                f"annotation {name} is for pods whose image is the VM, and this one has containers; leave it "
                'out, or choose a RuntimeClass whose handler has images = "machine"'
            )
