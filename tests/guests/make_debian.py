# SPDX-License-Identifier: Apache-2.0
"""Make disks of Debian as people have it, with cloud-init, OpenSSH's server and QEMU's guest agent, or not.

It needs root.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.guests import debian, disks
from tests.guests.debian import said
from tests.support.debian import tar

_PACKAGES = (
    *("systemd-sysv", "udev", "dbus", "kmod", "iproute2", "procps", "e2fsprogs", "busybox-static"),
    *("systemd-resolved", "initramfs-tools", "zstd", "linux-image-cloud-amd64"),
)
_CLOUD_INIT = ("cloud-init", "cloud-guest-utils", "fdisk", "sudo")
_SSH = ("openssh-server", "openssh-sftp-server")
#: What each family has besides.
PACKAGES: Mapping[str, Sequence[str]] = {
    "debian": (*_CLOUD_INIT, *_SSH, "qemu-guest-agent"),
    "debian-ssh": (*_CLOUD_INIT, *_SSH),
    "debian-agent": ("qemu-guest-agent",),
}
_SYSTEM_SIZE, _ROOT_SIZE = 96 * disks.MIB, 2048 * disks.MIB - 100 * disks.MIB  # 2 GiB together
_WORDS = f"root=PARTUUID={disks.uuid(3)} ro console=tty0 console=ttyS0,115200 net.ifnames=0 no_timer_check"
# After what cloud-init writes, which counts where there is both.
_DHCP = "[Match]\nName=eth* en*\n[Network]\nDHCP=yes\n[DHCPv4]\nUseMTU=yes\n"
_FILES: Mapping[str, str] = {
    "etc/fstab": f"PARTUUID={disks.uuid(3)} / ext4 rw,noatime 0 1\n",
    "etc/systemd/network/90-dhcp.network": _DHCP,
    "etc/hostname": "debian\n",
    "etc/machine-id": "",
}
_ENABLED = {
    "systemd-networkd.service": "multi-user.target.wants",
    "systemd-networkd.socket": "sockets.target.wants",
}


def make(family: str, work: Path, target: Path) -> None:
    """Make the one disk of a family in `target`."""
    tree = work / "tree"
    tree.mkdir()
    with tar([*_PACKAGES, *PACKAGES[family]]) as archive:
        said("tar", "--extract", "--numeric-owner", "--file", str(archive), "--directory", str(tree))
    _finish(tree)
    debian.unpack(disks.LOADERS, packages := work / "packages")
    system = disks.FileSystem(work / "system", _SYSTEM_SIZE, "SYSTEM")
    disks.write_loaders(system, packages, disks.menu(_WORDS))
    system.write("vmlinuz", _newest(tree, "vmlinuz"))
    system.write("initrd.gz", _newest(tree, "initrd.img"))
    root = work / "root"
    with root.open("xb") as file:
        file.truncate(_ROOT_SIZE)
    options = ("-q", "-t", "ext4", "-L", "debian", "-U", disks.uuid(4), "-E", "lazy_itable_init=1,nodiscard")
    said("mke2fs", *options, "-d", str(tree), str(root))
    raw = work / "disk.raw"
    disks.write_disk(raw, system.path, disks.bios_loader(work), disks.Last("root", root))
    said("qemu-img", "convert", "-q", "-c", "-O", "qcow2", str(raw), str(target / f"{family}.qcow2"))


def _newest(tree: Path, prefix: str) -> Path:
    return sorted((tree / "boot").glob(f"{prefix}-*"))[-1]


def _finish(tree: Path) -> None:
    for path, text in _FILES.items():
        (tree / path).write_text(text)
    units = tree / "etc/systemd/system"
    for unit, wants in _ENABLED.items():
        (units / wants).mkdir(exist_ok=True)
        (units / wants / unit).symlink_to(f"/lib/systemd/system/{unit}")
    # Each VM has its own.
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    for directory in ("var/lib/apt/lists", "var/cache/apt"):
        shutil.rmtree(tree / directory, ignore_errors=True)
