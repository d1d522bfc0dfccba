# SPDX-License-Identifier: Apache-2.0
"""Make a cloud's disk: a program that `cloud_disk` starts in namespaces of its own.

It mounts and attaches as it likes: the mounts are its own and end with it, however it ends, and so do
the programs that it has started.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

from infranetes.guest import cloud_recipe, cloud_time
from infranetes.guest.cloud_recipe import MIB
from infranetes.guest.programs import run
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import FailedPrecondition, InfranetesError

_ENABLED = ("systemd-networkd.service", cloud_recipe.GROW_UNIT, cloud_time.UNIT)
# Only templates need this unit, and a cloud's VM is none. Guest images without Docker don't have it.
_WARM_UNIT = "infranetes-warm.service"
_POLICY = Path("usr/sbin/policy-rc.d")  # denies packages the start of their services
# With each kernel these hooks would write another menu, without our words for the kernel. In the tree they
# fail, since they don't find the root's disk. Our menu names Debian's link to the newest kernel.
_MENU_HOOKS = tuple(f"etc/kernel/{event}.d/zz-update-grub" for event in ("postinst", "postrm"))
_SCRIPT = "run/infranetes-script"


@attrs.frozen
class DiskMaker:
    """One disk.

    :param work: a directory with the empty file `disk.raw`, and `tree` and `guest` to mount at.
    :param apt: settings for reaching Debian's archives. :param script: what the user adds; None: nothing.
    """

    work: Path
    guest_disk: Path
    source: str
    kind: str
    root: str
    apt: Path
    script: Path | None

    @property
    def disk(self) -> Path:
        return self.work / "disk.raw"

    @property
    def tree(self) -> Path:
        return self.work / "tree"

    @property
    def root_size(self) -> int:
        """Up to 1 MiB before the disk's end, where GPT has its copy. Bytes."""
        return self.disk.stat().st_size - (cloud_recipe.ROOT_START + 1) * MIB

    def make(self) -> None:
        """Make it. :raise InfranetesError, OSError: a step failed."""
        say("copying the guest image")
        self.format()
        self.mount()
        run("cp", "--archive", f"{self.work / 'guest'}/.", str(self.tree))
        run("umount", str(self.work / "guest"))
        for path in ("systemd-networkd.service", "systemd-networkd.socket"):
            (self.tree / "etc/systemd/system" / path).unlink(missing_ok=True)  # masked: QEMU needs none
        run("cp", "--archive", f"{self.work / 'files'}/.", str(self.tree))
        self.open_tree()
        self.install()
        if self.script is not None:
            self.run_script(self.script)
        self.enable()
        self.make_bootable()
        self.clean()

    def format(self) -> None:
        """Make the partitions, and the root's file system."""
        (self.work / "partitions").write_text(cloud_recipe.PARTITIONS)
        run("sh", "-euc", 'sfdisk --quiet "$1" <"$2"', "sh", str(self.disk), str(self.work / "partitions"))
        run(
            "mke2fs", "-q", "-t", "ext4", "-L", "infranetes", "-U", self.root,
            "-E", f"offset={cloud_recipe.ROOT_START * MIB},lazy_itable_init=1,nodiscard",
            str(self.disk), f"{self.root_size // 1024}k",
        )  # fmt: skip

    def mount(self) -> None:
        # The loop devices end with the mounts.
        where = f"loop,offset={cloud_recipe.ROOT_START * MIB},sizelimit={self.root_size}"
        run("mount", "-o", where, str(self.disk), str(self.tree))
        run("mount", "-o", "ro,loop,noload", str(self.guest_disk), str(self.work / "guest"))

    def open_tree(self) -> None:
        """Mount what programs in the tree expect. Nothing of it is written into the tree."""
        tree = str(self.tree)
        run("mount", "--rbind", "/dev", f"{tree}/dev")
        run("mount", "-t", "proc", "proc", f"{tree}/proc")
        run("mount", "--rbind", "/sys", f"{tree}/sys")
        for directory in ("run", "tmp"):
            run("mount", "-t", "tmpfs", "tmpfs", f"{tree}/{directory}")
        (self.tree / "tmp").chmod(0o1777)
        # Names are looked up as on this machine; the file itself stays empty, until the pod sets its content.
        run("mount", "--bind", str(Path("/etc/resolv.conf").resolve()), f"{tree}/etc/resolv.conf")
        shutil.copyfile(self.apt, self.tree / "run/apt.conf")
        policy = self.tree / _POLICY
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)

    def inside(self, *command: str) -> None:
        """Run a program in the tree."""
        run("chroot", str(self.tree), "env", "APT_CONFIG=/run/apt.conf", *command)

    def install(self) -> None:
        packages = (*cloud_recipe.PACKAGES, *cloud_recipe.SOURCES[self.source].packages)
        say(f"installing {', '.join(packages)}")
        self.inside("apt-get", "update", "-q")
        without = (f"-oDpkg::Options::=--path-exclude={each}" for each in cloud_time.EXCLUDED)
        self.inside("apt-get", "install", "-qy", "--no-install-recommends", *without, *packages)
        for hook in _MENU_HOOKS:
            (self.tree / hook).unlink(missing_ok=True)

    def run_script(self, script: Path) -> None:
        say(f"running {script}")
        copy = self.tree / _SCRIPT
        shutil.copyfile(script, copy)
        copy.chmod(0o700)
        self.inside(f"/{_SCRIPT}")

    def enable(self) -> None:
        self.inside("systemctl", "--quiet", "enable", *_ENABLED)
        if (self.tree / "etc/systemd/system" / _WARM_UNIT).exists():
            self.inside("systemctl", "--quiet", "disable", _WARM_UNIT)
        if self.kind == "docker":
            self.inside("systemctl", "--quiet", "enable", "docker.service")  # off where it is one of several

    def make_bootable(self) -> None:
        say("making it bootable by BIOS and by UEFI")
        kernel = (self.tree / "vmlinuz").resolve().name.removeprefix("vmlinuz-")
        lacking = list(lacking_drivers(self.tree / "lib/modules" / kernel))
        if lacking:
            raise FailedPrecondition(
                f"Linux {kernel} has no {', '.join(lacking)}: clouds' machines need them"
            )
        self.inside("update-initramfs", "-u", "-k", "all")
        loop = said("losetup", "--find", "--show", str(self.disk.absolute()))
        try:
            options = ("--target=i386-pc", "--modules=part_gpt ext2 search_fs_uuid")
            self.inside("grub-install", *options, loop)
        finally:
            run("losetup", "--detach", loop)
        self.fill_esp()

    def fill_esp(self) -> None:
        """Put Debian's signed boot loader where firmware looks on disks that it doesn't know.

        Not by a mount: kernels for nodes needn't have FAT."""
        library = self.tree / "usr/lib"
        esp, menu = self.work / "esp", self.work / "esp-menu"
        menu.write_text(cloud_recipe.esp_menu(self.root))
        with esp.open("xb") as file:
            file.truncate(cloud_recipe.ESP_SIZE * MIB)
        run("mkfs.vfat", "-F", "32", "-n", "ESP", str(esp))
        run("mmd", "-i", str(esp), "::/EFI", "::/EFI/BOOT", "::/EFI/debian")
        for loader, path in (
            (library / "shim/shimx64.efi.signed", "BOOT/BOOTX64.EFI"),
            (library / "grub/x86_64-efi-signed/grubx64.efi.signed", "BOOT/grubx64.efi"),
            (menu, "debian/grub.cfg"),
        ):
            run("mcopy", "-i", str(esp), str(loader), f"::/EFI/{path}")
        where = ("bs=1M", f"seek={cloud_recipe.ESP_START}", "conv=notrunc,sparse")
        run("dd", f"if={esp}", f"of={self.disk}", *where)

    def clean(self) -> None:
        """Remove package caches and the machine's own identity, and free their blocks in the disk's file."""
        say("cleaning up")
        self.inside("apt-get", "clean")
        (self.tree / _POLICY).unlink()
        run(
            "umount", "--recursive", *(f"{self.tree}/{each}" for each in ("dev", "proc", "sys", "run", "tmp"))
        )
        run("umount", f"{self.tree}/etc/resolv.conf")
        for directory in ("var/lib/vmserver", "var/lib/apt/lists"):
            shutil.rmtree(self.tree / directory, ignore_errors=True)
        (self.tree / "etc/machine-id").write_bytes(b"")
        run("fstrim", str(self.tree))
        run("umount", str(self.tree))


def lacking_drivers(modules: Path) -> Iterator[str]:
    """Return those of the drivers that a kernel lacks.

    :param modules: its directory below /lib/modules."""
    names = set()
    for file in ("modules.dep", "modules.builtin"):
        for line in (modules / file).read_text().splitlines():
            path, _, _ = line.partition(":")
            names.add(Path(path).name.partition(".ko")[0].replace("-", "_"))
    for driver in (*cloud_recipe.DISK_DRIVERS, *cloud_recipe.CARD_DRIVERS):
        if driver not in names:
            yield driver


def say(words: str) -> None:
    """Report what is being done now."""
    print(f"I: {words}", flush=True)


def said(*command: str) -> str:
    """Run a program to its end and return what it says."""
    return thd_check(Command(command, None)).decode().strip()


def main() -> int:
    """Make the disk that the arguments describe."""
    work, guest_disk, source, kind, root, apt, *script = sys.argv[1:]
    maker = DiskMaker(
        Path(work), Path(guest_disk), source, kind, root, Path(apt), Path(script[0]) if script else None
    )
    try:
        maker.make()
    except (InfranetesError, OSError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
