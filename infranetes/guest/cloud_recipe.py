# SPDX-License-Identifier: Apache-2.0
"""What a cloud's disk has over the guest image that it is made of. Data only, for `cloud_disk`.

A guest image is a file system for QEMU, which gives it kernel, disk driver, addresses and identity. On a
cloud the disk boots by itself, by BIOS or by UEFI, and gets its addresses by DHCP and its identity and its
time from the cloud.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from infranetes.guest import cloud_time, quiet, recipe
from infranetes.guest.image import GuestImage
from infranetes_common.errors import FailedPrecondition

MIB = 1 << 20
Files = Mapping[str, tuple[int, str]]  # by path: mode and text


@attrs.frozen
class Source:
    """A cloud, or QEMU on the node, which boots such a disk as the image of a pod.

    :ivar identity: where the agent gets its identity from, in its own words.
    :ivar card: what `[Match]` says of the network cards that DHCP gives addresses.
    :ivar kernel: further words for the kernel. :ivar packages: Debian's.
    :ivar clock: the cloud's own, in chrony's words; "": none but those that DHCP tells.
    """

    identity: str
    card: str = "Name=eth*"
    kernel: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    clock: str = ""
    files: Files = attrs.field(factory=dict)


# vmtoolsd reads guestinfo for the agent, and tells vCenter the VM's addresses: only those of its cards.
_TOOLS = "[guestinfo]\nexclude-nics=docker*,veth*,br-*\n"
# Where the node gives the VM its address, the agent sets it, and DHCP must not be asked for one.
_STATIC = """\
[Service]
ExecCondition=+/bin/sh -c '! vmtoolsd --cmd "info-get guestinfo.infranetes.static" | grep -qx true'
"""

SOURCES: Mapping[str, Source] = {
    # An EBS volume may be slow, but it comes back: Linux' own 30 s would make the root read-only for good.
    "aws": Source("aws", kernel=("nvme_core.io_timeout=4294967295",), clock=cloud_time.AWS),
    # This leaves out the cards that accelerated networking adds: they have the same addresses.
    "azure": Source("azure", card="Driver=hv_netvsc", clock=cloud_time.AZURE),
    "gcp": Source("gcp", clock=cloud_time.GCP),
    "openstack": Source("openstack"),
    # The node corrects the clocks of its VMs.
    "qemu": Source("virtio-serial"),
    "vsphere": Source(
        "vsphere",
        packages=("open-vm-tools",),
        files={
            "etc/vmware-tools/tools.conf": (0o644, _TOOLS),
            "etc/systemd/system/systemd-networkd.service.d/static.conf": (0o644, _STATIC),
        },
    ),
}

# What runs the pod's containers; `machine`: the pod is the VM.
KINDS = ("docker", "machine", "oci")
DEFAULT_KIND = "docker"

# Installed into the disk. Debian's signed boot loader can be started where Secure Boot is on too.
PACKAGES = ("grub2-common", "grub-pc-bin", "grub-efi-amd64-signed", "shim-signed", *cloud_time.PACKAGES)

# The drivers of disks that the root may be on. The initial RAM disk gets them besides virtio's, which it has.
DISK_DRIVERS = ("nvme", "sd_mod", "virtio_scsi", "vmw_pvscsi", "hv_storvsc", "xen_blkfront")
# Further ones, which the guest image's kernel lacks; a script may install a kernel that has them.
MORE_DISK_DRIVERS = ("ahci", "mptsas", "mptspi")
CARD_DRIVERS = ("virtio_net", "ena", "gve", "vmxnet3", "hv_netvsc", "xen_netfront")

# GPT: a boot loader for BIOS, another for UEFI, and the root as the last one, which grows. Sizes in MiB.
BIOS_START, BIOS_SIZE = 1, 1
ESP_START, ESP_SIZE = 2, 62
ROOT_START = 64
PARTITIONS = f"""\
label: gpt
start={BIOS_START}MiB, size={BIOS_SIZE}MiB, type=21686148-6449-6E6F-744E-656564454649, name=bios
start={ESP_START}MiB, size={ESP_SIZE}MiB, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, name=esp
start={ROOT_START}MiB, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709, name=root
"""

_GROW = """\
[Unit]
Description=Give the root what its disk has
DefaultDependencies=no
After=systemd-remount-fs.service
Before=local-fs.target shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/systemd-repart --dry-run=no --seed=random --definitions=/usr/lib/infranetes/root-partition
ExecStart=/lib/systemd/systemd-growfs /

[Install]
WantedBy=local-fs.target
"""
GROW_UNIT = "infranetes-grow.service"
DHCP_UNIT = "etc/systemd/network/50-dhcp.network"


def files(source: str, kind: str, guest: GuestImage, root: str) -> Files:
    """Return the files that are written into the guest's tree.

    :param root: the UUID of its file system. A label would be that of each volume made of such a disk, too.
    :raise FailedPrecondition: the guest image has nothing that runs containers of this kind.
    """
    cloud = SOURCES[source]
    return {
        "etc/infranetes/vmserver.toml": (0o644, agent(source, kind, guest)),
        "etc/fstab": (0o644, f"UUID={root} / ext4 rw,noatime 0 1\n"),
        "usr/share/initramfs-tools/modules.d/infranetes-cloud": (
            0o644,
            "\n".join((*DISK_DRIVERS, *MORE_DISK_DRIVERS)) + "\n",
        ),
        DHCP_UNIT: (0o644, f"[Match]\n{cloud.card}\n[Network]\nDHCP=ipv4\n[DHCPv4]\nUseMTU=yes\n"),
        f"etc/systemd/system/{GROW_UNIT}": (0o644, _GROW),
        "usr/lib/infranetes/root-partition/root.conf": (0o644, "[Partition]\nType=root\n"),
        "boot/grub/grub.cfg": (0o644, _menu(cloud, root)),
        **quiet.UNDONE,
        **cloud_time.files(cloud.clock),
        **cloud.files,
    }


def agent(source: str, kind: str, guest: GuestImage) -> str:
    """Return the agent's configuration. :raise FailedPrecondition: as `files`."""
    beside = {each.providers: each.files.get(recipe.AGENT, (0, ""))[1] for each in recipe.CONTAINERS.values()}
    if kind != "machine" and guest.providers and kind not in guest.providers:
        raise FailedPrecondition(
            f"the guest image in {guest.directory} runs containers by {', '.join(guest.providers)}, not by "
            f"{kind}: build one with `infranetes-guest build --containers {kind}`, or choose another kind"
        )
    text = f'provider = "{kind}"\n'
    if kind == "oci":
        text = beside.get(guest.providers) or text  # with the other choices that its pods have
    return f'{text}\n[identity]\nsource = "{SOURCES[source].identity}"\n'


def esp_menu(root: str) -> str:
    """Return the file beside UEFI's boot loader, which tells it where the menu is."""
    return f"search --no-floppy --fs-uuid --set=root {root}\nconfigfile /boot/grub/grub.cfg\n"


def _menu(cloud: Source, root: str) -> str:
    # Messages are read on the serial console. Cards keep the kernel's names, eth0 and so on, on every cloud.
    words = ["rw", "console=tty0", "console=ttyS0,115200", "net.ifnames=0", *cloud.kernel]
    return (
        f"search --no-floppy --fs-uuid --set=root {root}\n"
        f"linux /vmlinuz root=UUID={root} {' '.join(words)}\n"
        "initrd /initrd.img\n"
        "boot\n"
    )
