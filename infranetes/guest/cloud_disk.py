# SPDX-License-Identifier: Apache-2.0
"""Making a disk that a cloud's machines boot, from the guest image.

A disk is made in a directory beside the file that it becomes, and renamed when it is whole. The program that
makes it has mounts and processes of its own, which end with this process, even if that is killed. What may
be left then is the directory, and a loop device of a file in it: the next disk of that name ends both.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from infranetes.guest import cloud_recipe
from infranetes.guest import image as images
from infranetes.guest.build import NEEDED_BYTES
from infranetes.guest.programs import Progress, check, run
from infranetes.guest.sources import of_this_machine
from infranetes_common.commands import Command, thd_run
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from infranetes_common.loop_devices import loop_devices_of

DEFAULT_GIB = 8
_MIN_GIB, _MAX_GIB = 2, 2048
TOOLS = {
    "chroot": "coreutils",
    "fstrim": "util-linux",
    "losetup": "mount",
    "mcopy": "mtools",
    "mke2fs": "e2fsprogs",
    "mkfs.vfat": "dosfstools",
    "mount": "mount",
    "setpriv": "util-linux",
    "sfdisk": "fdisk",
    "unshare": "util-linux",
}
# The maker has mounts and processes of its own, which the kernel ends when this process ends.
_ALONE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--propagation", "private"),
)
# The maker imports this very package, wherever that is, and nothing from its working directory.
_PACKAGES = Path(__file__).resolve().parents[2]
_MAKER = ("env", f"PYTHONPATH={_PACKAGES}", sys.executable, "-P", "-m", "infranetes.guest.disk_maker")


def build_cloud_disk(
    source: str,
    kind: str,
    target: Path,
    gib: int,
    report: Progress,
    *,
    script: Path | None = None,
    image_dir: Path = images.DEFAULT_DIR,
) -> None:
    """Make the file `target` a disk of the guest image in use, which boots by BIOS and by UEFI.

    :param source: the cloud, or qemu: one of `cloud_recipe.SOURCES`.
    :param kind: one of `cloud_recipe.KINDS`.
    :param gib: of the disk, at least; on a larger one the root grows when it boots.
    :param report: told what is done now. :param image_dir: where guest images are.
    :param script: run in the disk's tree, for what the image is for: packages and units of the user's own.
    :raise InvalidArgument: an argument is of no use; the message names it.
    :raise FailedPrecondition: a tool, a privilege or a guest image that fits is missing; it says which.
    :raise ResourceExhausted: there is no room. :raise InfranetesError: a step failed; the message has the end
        of its output.
    """
    _check_arguments(source, kind, gib, script)
    _check_machine()
    guest = images.current(image_dir)
    root = str(uuid.uuid4())
    files = cloud_recipe.files(source, kind, guest, root)
    target = target.absolute()
    _clear(target)
    if (free := shutil.disk_usage(target.parent).free) < NEEDED_BYTES:
        raise ResourceExhausted(
            f"{target.parent} has {free >> 20} MiB free, a cloud's disk takes up to "
            f"{NEEDED_BYTES >> 20} MiB; make room, or choose another directory"
        )
    with _work_directory(target) as work:
        for name in ("tree", "guest"):
            (work / name).mkdir()
        _lay_out(work / "files", files)
        disk = work / "disk.raw"
        with disk.open("xb") as file:
            file.truncate(gib << 30)
        apt = work / "apt.conf"
        apt.write_text("".join(line + "\n" for line in of_this_machine().settings))
        arguments = [str(work), str(guest.disk.resolve()), source, kind, root, str(apt)]
        if script is not None:
            arguments.append(str(script.absolute()))
        run(*_ALONE, *_MAKER, *arguments, progress=report, end_by=signal.SIGKILL, name="making the disk")
        with disk.open("rb") as file:
            os.fsync(file.fileno())
        disk.replace(target)


def _check_arguments(source: str, kind: str, gib: int, script: Path | None) -> None:
    for name, value, known in (
        ("source", source, sorted(cloud_recipe.SOURCES)),
        ("kind", kind, cloud_recipe.KINDS),
    ):
        if value not in known:
            raise InvalidArgument(f"{name} {value!r}: expected one of {', '.join(known)}")
    if not _MIN_GIB <= gib <= _MAX_GIB:
        raise InvalidArgument(f"size {gib}: expected {_MIN_GIB} to {_MAX_GIB} GiB")
    if script is not None and not script.is_file():
        raise InvalidArgument(f"script {script}: there is no such file")


def _check_machine() -> None:
    check(TOOLS, "to make a cloud's disk")
    if os.geteuid() != 0:
        raise FailedPrecondition("a cloud's disk is made by root, who may mount and change root")


def _lay_out(tree: Path, files: cloud_recipe.Files) -> None:
    for path, (mode, text) in files.items():
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        file.write_text(text)
        file.chmod(mode)


def _prefix(target: Path) -> str:
    return f".{target.name}.cloud-disk-"


@contextlib.contextmanager
def _work_directory(target: Path) -> Iterator[Path]:
    """Make a directory beside `target`, which is locked while it is in use and removed afterwards."""
    work = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield work
    finally:
        _remove(work)
        os.close(descriptor)


def _clear(target: Path) -> None:
    """Remove what killed makers of this file have left."""
    for leftover in target.parent.glob(f"{_prefix(target)}*"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with contextlib.suppress(BlockingIOError):  # another process is making it now
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(leftover)
            finally:
                os.close(descriptor)


def _remove(work: Path) -> None:
    """Remove a directory of work and its loop devices. Idempotent."""
    for device in loop_devices_of(str(work / "disk.raw")):
        thd_run(Command(["losetup", "--detach", device], None))
    shutil.rmtree(work, ignore_errors=True)
