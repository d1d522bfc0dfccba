# SPDX-License-Identifier: Apache-2.0
"""Building the guest image by the recipe: mmdebstrap makes a tree, and mke2fs makes a disk of it.

An image is built in a directory of its own beside the others, which is renamed when it is whole. So a build
that is killed leaves no half-made image, and the next build removes its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from infranetes.guest import image as images
from infranetes.guest import recipe
from infranetes.guest.image import GuestImage
from infranetes.guest.programs import Progress, check, run
from infranetes.guest.recipe import Containers
from infranetes.guest.sources import Sources, of_release
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import FailedPrecondition, ResourceExhausted

TOOLS = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "dpkg-deb": "dpkg", "apt-get": "apt"}
NEEDED_BYTES = 3 << 30  # free disk space for a build
_KEPT = 2  # images: the current one and the one before
_WORK = ".build-"
_LOCK = "lock"
_DEBS = "var/cache/infranetes-debs"  # in the guest, during a build


def build(
    directory: Path,
    debs: Path,
    progress: Progress,
    *,
    force: bool = False,
    containers: Containers = recipe.CONTAINERS[recipe.DEFAULT_CONTAINERS],
    or_more: bool = False,
) -> GuestImage:
    """Return the image of this recipe and these packages; it is built if it is missing.

    :param directory: where images are.
    :param debs: where Infranetes' own .deb files are.
    :param containers: what runs containers in it.
    :param or_more: whether the image in use will do if it has that and more.
    :param force: build it anew even if recipe and packages have not changed, for Debian's updates.
    :raise FailedPrecondition: a tool, a package or a privilege is missing; the message says which.
    :raise ResourceExhausted: the disk is full.
    :raise InfranetesError: a step failed; the message has the end of its output.
    """
    packages = _our_packages(debs)
    key = _key(packages, containers)
    enough = {key, *(_key(packages, each) for each in recipe.more_than(containers) if or_more)}
    with contextlib.suppress(FailedPrecondition):
        if not force and (there := images.current(directory)).key in enough:
            return there
    _check_machine()
    directory.mkdir(parents=True, exist_ok=True)
    with _only_one(directory, progress):
        _clear(directory)
        with contextlib.suppress(FailedPrecondition):
            if not force and (there := images.read(directory / key)).key == key:
                _make_current(directory, there)
                return there
        _check_space(directory)
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=directory))
        try:
            made = _make(work, key, packages, containers, progress)
            final = directory / (f"{key}-{int(made.built_at)}" if (directory / key).exists() else key)
            work.rename(final)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        made = images.read(final)
        _make_current(directory, made)
        _prune(directory, made)
    return made


def _make(
    work: Path, key: str, packages: Sequence[Path], containers: Containers, progress: Progress
) -> GuestImage:
    work.chmod(0o755)
    sources = of_release(recipe.RELEASE)
    root = work / "root"
    _lay_out(work / "files", containers)
    progress(
        f"installing Debian {sources.codename}, the agent and what its providers "
        f"({', '.join(containers.providers)}) need into a tree"
    )
    _mmdebstrap(work, root, sources, packages, containers, progress)
    [kernel] = sorted((root / "boot").glob("vmlinuz-*"))[-1:]
    version = kernel.name.removeprefix("vmlinuz-")
    shutil.copyfile(kernel, work / "vmlinuz")
    shutil.copyfile(root / "boot" / f"initrd.img-{version}", work / "initrd")
    progress(f"making a disk of the tree ({_megabytes(root)} MB)")
    disk = work / "disk.raw"
    options = "lazy_itable_init=1,assume_storage_prezeroed=1,nodiscard"
    # No journal: a clone's disk goes with the clone, and is never mounted again.
    run(
        "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-L", "infranetes", "-E", options,
        "-d", str(root), str(disk), f"{recipe.DISK_GIB}G",
    )  # fmt: skip
    for leftover in (root, work / "files", work / "debs"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in (work / "sources.list", work / "apt.conf", work / "mmdebstrap.log"):
        leftover.unlink(missing_ok=True)
    made = GuestImage(
        work,
        key,
        time.time(),
        sources.codename,
        version,
        tuple(deb.stem for deb in packages),
        containers.providers,
    )
    images.write(made)
    return made


def _lay_out(files: Path, containers: Containers) -> None:
    """Write the recipe's files to a tree that is copied over the guest's."""
    for path, (mode, text) in {**recipe.FILES, **containers.files}.items():
        target = files / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
    units = files / "etc/systemd/system"
    for unit in recipe.MASKED:
        (units / unit).symlink_to("/dev/null")
    for directory in files.rglob("*"):
        if directory.is_dir() and not directory.is_symlink():
            directory.chmod(0o755)
    files.chmod(0o755)


def _mmdebstrap(
    work: Path,
    root: Path,
    sources: Sources,
    packages: Sequence[Path],
    containers: Containers,
    progress: Progress,
) -> None:
    (work / "sources.list").write_text("".join(line + "\n" for line in sources.lines))
    (work / "apt.conf").write_text("".join(line + "\n" for line in sources.settings))
    (work / "debs").mkdir()
    for package in packages:
        shutil.copy(package, work / "debs")
    install = "apt-get install --yes --no-install-recommends"
    hooks = [
        # This precedes the configuration of kernel and Docker, which reads some of these files.
        ("essential", f'cp -a "{work}/files/." "$1/"'),
        ("customize", f'mkdir -p "$1/{_DEBS}" && cp "{work}"/debs/*.deb "$1/{_DEBS}/"'),
        ("customize", f'chroot "$1" sh -c "{install} /{_DEBS}/*.deb" </dev/null'),
        ("customize", f'rm -rf "$1/{_DEBS}" "$1/etc/apt/apt.conf.d/99mmdebstrap"'),
        (
            "customize",
            f'chroot "$1" systemctl --quiet enable {" ".join((*recipe.ENABLED, *containers.enabled))}',
        ),
        *(("customize", f'chroot "$1" systemctl --quiet disable {unit}') for unit in containers.disabled),
        ("customize", 'rm -f "$1/etc/resolv.conf" "$1/var/lib/dbus/machine-id" "$1/etc/ssh/ssh_host_"*'),
        ("customize", ': >"$1/etc/resolv.conf"; : >"$1/etc/machine-id"; echo pod >"$1/etc/hostname"'),
    ]
    command = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join((*recipe.PACKAGES, *containers.packages))}",
        f"--aptopt={work}/apt.conf",
        '--aptopt=Acquire::Languages "none"',
        "--dpkgopt=force-confold",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.EXCLUDED),
        *(f"--{when}-hook={what}" for when, what in hooks),
        sources.codename,
        str(root),
        str(work / "sources.list"),
    ]
    run(*command, progress=progress)


def _our_packages(debs: Path) -> list[Path]:
    found = []
    for name in recipe.OUR_PACKAGES:
        there = sorted(debs.glob(f"{name}_*.deb"), key=lambda deb: deb.stat().st_mtime)
        if not there:
            raise FailedPrecondition(
                f"{debs} has no {name}_*.deb, which goes into the guest image; make it with `make deb`, "
                "or say with --debs where it is"
            )
        found.append(there[-1])
    return found


def _key(packages: Sequence[Path], containers: Containers) -> str:
    """Digest recipe and own packages. Updates of Debian's packages do not change it."""
    digest = hashlib.sha256(containers.name.encode())
    for module in ("recipe.py", "quiet.py", "runtime.py", "shims.py", "build.py"):
        digest.update(Path(__file__).with_name(module).read_bytes())
    for package in packages:
        digest.update(hashlib.sha256(package.read_bytes()).digest())
    return digest.hexdigest()[:24]


def _check_machine() -> None:
    check(TOOLS, "to build a guest image")
    if os.geteuid() != 0:
        raise FailedPrecondition("a guest image is built by root: its files belong to the guest's users")


def _check_space(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < NEEDED_BYTES:
        raise ResourceExhausted(
            f"{directory} has {free >> 20} MiB free, a guest image takes {NEEDED_BYTES >> 20} MiB to build; "
            "make room, or choose another directory"
        )


@contextlib.contextmanager
def _only_one(directory: Path, progress: Progress) -> Iterator[None]:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build of the guest image to end")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(directory: Path) -> None:
    for leftover in directory.glob(f"{_WORK}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _make_current(directory: Path, made: GuestImage) -> None:
    link = directory / f".{images.CURRENT}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(made.directory.name)
    link.replace(directory / images.CURRENT)


def _prune(directory: Path, made: GuestImage) -> None:
    """Remove old images. Files that a running VM has open stay readable to it."""
    others = []
    for manifest in directory.glob(f"*/{images.MANIFEST}"):
        if manifest.parent.is_symlink() or manifest.parent == made.directory:
            continue
        with contextlib.suppress(OSError, ValueError):
            others.append((json.loads(manifest.read_bytes())["built_at"], manifest.parent))
    for _, old in sorted(others, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def _megabytes(tree: Path) -> int:
    size = thd_check(Command(["du", "-sk", str(tree.absolute())], None))
    return int(size.split()[0]) // 1000


def say(started: float, words: str) -> None:
    """Print one line of progress on standard error, with the seconds since `started`."""
    print(f"{time.monotonic() - started:6.1f} s  {words}", file=sys.stderr, flush=True)
