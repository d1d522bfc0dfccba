# SPDX-License-Identifier: Apache-2.0
"""A clean Debian in which to install the built packages, made from this machine's package sources."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from infranetes.guest import sources
from tests.support.disk_space import Scratch

TREE = Path(__file__).resolve().parents[2]
CACHE = TREE / "build" / "cleanroot"
RELEASE = "bookworm"  # the release of Debian on which the packages are built
# A prefix with which a command ends if the process that waits for it is killed.
_END_TOO = ("setpriv", "--pdeathsig", "KILL", "--")
# Directories whose files the system itself changes at run time.
FLEETING = ("dev", "proc", "sys", "tmp", "run", "var/cache", "var/log", "var/lib/dpkg", "var/lib/apt")


class NotMade(AssertionError):
    """Something that `make vm-tools` makes is not there."""

    def __init__(self, what: object) -> None:
        super().__init__(f"{what} is not there: make vm-tools")


@functools.cache
def debs() -> Path:
    """Return a directory with the packages of this very tree, which stays as it is while this process lives.

    They are built, if need be, without their tests, which run beside these.
    """
    made = subprocess.run(
        ["make", "--silent", "deb"],
        cwd=TREE,
        env={**os.environ, "DEB_BUILD_OPTIONS": "nocheck"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode:
        raise AssertionError(made.stdout)
    scratch = Scratch.make("debs")
    atexit.register(scratch.remove)
    kept = scratch.path
    for deb in (TREE / "dist").glob("*.deb"):
        shutil.copy(deb, kept)
    return kept


def built(package: str) -> Path:
    """Return the path of the .deb of one of our packages."""
    found = sorted(debs().glob(f"{package}_*.deb"))
    if len(found) != 1:
        raise AssertionError(f"make deb left {len(found)} packages named {package} in dist/")
    return found[0]


def depends(*packages: str, field: str = "Depends") -> list[str]:
    """Return the Debian packages that a field of these packages of ours names, of alternatives the first."""
    names = set()
    for package in packages:
        told = subprocess.run(
            ["dpkg-deb", "--field", built(package), field], check=True, capture_output=True, text=True
        ).stdout
        for entry in told.strip().split(","):
            names.add(re.split(r"[\s(:|]", entry.strip())[0])
    return sorted(names - {"infranetes", "infranetes-common", "vmserver"})


def tar_of(packages: Sequence[str], release: str, purpose: str) -> Path:
    """Return where the tar of a minimal Debian with these packages is, once `base` has made it.

    :param purpose: the cache keeps one tar for each purpose and release.
    """
    wanted = "\n".join((*sources.of_release(release).lines, *packages))
    return CACHE / f"{release}-{purpose}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.tar"


def base(packages: Sequence[str], release: str = RELEASE, purpose: str = "node") -> Path:
    """Return the tar of a minimal Debian with these packages, from the cache or made now (minutes)."""
    tar = tar_of(packages, release, purpose)
    if tar.exists():
        return tar
    archives = sources.of_release(release)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        scratch = Path(directory)
        (scratch / "sources.list").write_text("".join(f"{line}\n" for line in archives.lines))
        (scratch / "apt.conf").write_text("".join(f"{line}\n" for line in archives.settings))
        command = [
            *("nice", "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(packages)}"),
            *(f"--aptopt={scratch / 'apt.conf'}", "--aptopt=APT::Install-Recommends false"),
            *('--aptopt=Acquire::Languages "none"', "--dpkgopt=path-exclude=/usr/share/man/*"),
            *(release, str(scratch / "base.tar"), str(scratch / "sources.list")),
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"mmdebstrap: {done.stderr[-4000:]}")
        (scratch / "base.tar").rename(tar)
    for old in CACHE.glob(f"{release}-{purpose}-*.tar"):
        if old != tar:
            old.unlink()
    return tar


class CleanRoot:
    """An unpacked root, in which commands run in their own mount and PID namespaces.

    :param network: the network namespace that they run in; None: this machine's.
    :param binds: this machine's directories that appear there at the same paths, read-only.
    """

    def __init__(self, tar: Path, network: Path | None = None, binds: Sequence[Path] = ()) -> None:
        self._network = network
        self._binds = binds
        # The path is short, because a unix socket's path may have at most 107 bytes.
        self._scratch = Scratch.make("root")
        self.path = self._scratch.path
        try:
            subprocess.run(["tar", "-xf", tar, "-C", self.path], check=True)
        except BaseException:  # such as a full disk, which is not to stay full
            self.remove()
            raise

    def _mounts(self) -> Iterator[str]:
        """Yield the commands for sh that mount what a system needs."""
        yield f"mount --bind {self.path} {self.path}"  # because `ip -n` changes mounts below it
        yield f"mount -t proc proc {self.path}/proc"
        yield f"mount --rbind /dev {self.path}/dev"
        if self._network is None:
            yield f"mount --rbind /sys {self.path}/sys"
        else:  # a new sysfs, whose /sys/class/net shows that namespace
            yield f"mount -t sysfs sysfs {self.path}/sys"
            yield f"mount --rbind /sys/fs/cgroup {self.path}/sys/fs/cgroup"
        for path in self._binds:
            yield f"mkdir -p {self.path}{path}"
            yield f"mount --bind -o ro {path} {self.path}{path}"

    def _inside(self, command: list[str], enter_root: str = "chroot") -> list[str]:
        script = f'{" && ".join(self._mounts())} && exec {enter_root} {self.path} "$@"'
        enter = ("nsenter", f"--net={self._network}", "--") if self._network else ()
        own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--")
        return [*enter, *own, "sh", "-c", script, "sh", *command]

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
        }

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `stdout` has output and errors together. `timeout`: in seconds."""
        return subprocess.run(
            [*_END_TOO, *self._inside(list(command))],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env=self._environment,
        )

    def show(self, *command: str, timeout: float) -> int:
        """Run a command to its end, with this process's standard output and error; return its exit code.

        Unlike in a chroot, it may make user namespaces and share mounts, as on a machine.
        """
        inside = self._inside(list(command), f"{sys.executable} {Path(__file__).with_name('pivot.py')}")
        done = subprocess.run([*_END_TOO, *inside], check=False, timeout=timeout, env=self._environment)
        return done.returncode

    def install(self, *packages: str) -> subprocess.CompletedProcess[str]:
        """Install our built packages with dpkg, which fails if a dependency is missing."""
        for package in packages:
            shutil.copy(built(package), self.path / "tmp")
        return self.run("dpkg", "--install", *(f"/tmp/{built(package).name}" for package in packages))

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the background. Its output goes to the root's /tmp/output. `end` it."""
        with open(self.path / "tmp/output", "ab") as output:
            return subprocess.Popen(
                self._inside(list(command)), stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def output(self) -> str:
        """Return what the background command has written."""
        return (self.path / "tmp/output").read_text(errors="replace")

    def end(self, process: subprocess.Popen[bytes], timeout: float = 20) -> int:
        """End the command and all its processes, as systemd does, and return its exit code."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        try:
            return process.wait(timeout)
        finally:
            process.kill()
            process.wait()

    def files(self) -> set[str]:
        """Return all paths, except those that the system itself keeps changing."""
        found: set[str] = set()
        for directory, directories, names in os.walk(self.path):
            inside = Path(directory).relative_to(self.path)
            directories[:] = [name for name in directories if str(inside / name) not in FLEETING]
            found.update(str(inside / name) for name in [*directories, *names])
        return found

    def remove(self) -> None:
        """Delete the root. Its mounts have ended with its processes."""
        self._scratch.remove()
