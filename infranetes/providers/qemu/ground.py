"""What the provider stands on: rights, programs, the user that QEMU runs as, the machine's parameters."""

from __future__ import annotations

import errno
import fcntl
import grp
import json
import os
import pwd
import shutil
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from infranetes.providers.qemu import accelerator
from infranetes.providers.qemu.machine import Machine, User
from infranetes.providers.qemu.process import check, find_program
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.subnet import subnet
from infranetes.providers.qemu.vm import Paths
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable

_PROGRAMS = ("setsid", "setpriv", "ip", "nft")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def qemu_user(name: str) -> User:
    """User, group and other groups that QEMU runs with: with /dev/kvm's group, where that may use it.

    :raise FailedPrecondition: there is no such user; says how to make it.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise FailedPrecondition(
            f"there is no user {name} for QEMU to run as; make it with "
            f"`useradd --system --shell /usr/sbin/nologin {name}`, or set providers.qemu.user"
        ) from None
    groups = []
    try:
        status = os.stat(accelerator.KVM)
        if status.st_mode & 0o060 == 0o060 and status.st_gid != 0:
            groups.append(grp.getgrgid(status.st_gid).gr_gid)
    except (OSError, KeyError):
        pass
    return entry.pw_uid, entry.pw_gid, groups


def check_rights() -> None:
    """:raise FailedPrecondition: not root, or a program is missing."""
    if os.geteuid() != 0:
        raise FailedPrecondition(
            "the QEMU provider needs root, for bridge and taps; QEMU itself gets no rights"
        )
    for program in _PROGRAMS:
        find_program(program)


def make_directories(paths: Paths, templates: Path) -> None:
    """:raise FailedPrecondition: a directory can't be made."""
    for path in (paths.state, paths.run, paths.vms, templates):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{path} can't be made: {error.strerror}; see state_dir and run_dir"
            ) from error


def sweep(directory: Path, known: set[str]) -> None:
    """Remove the sockets of VMs and templates that are no more."""
    for path in directory.iterdir():
        if path.name not in known:
            shutil.rmtree(path, ignore_errors=True)


def take_lock(paths: Paths) -> int:
    """A descriptor that holds the lock of this state directory for as long as it is open.

    :raise FailedPrecondition: another daemon is at work here.
    """
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FailedPrecondition(
            f"another daemon is at work in {paths.state}; stop it, or give this one a state_dir of its own"
        ) from None
    return descriptor


async def find_machine(reactor: Any, settings: QemuSettings, user: User, memory: Path) -> tuple[Machine, str]:
    """The machine's parameters on this node, and why it has its accelerator.

    :raise FailedPrecondition: QEMU is missing, or KVM is configured and does not work.
    """
    qemu = find_program(settings.qemu)
    find_program(settings.qemu_img)
    version = (await check(reactor, [qemu, "--version"], 30.0)).decode().splitlines()[0]
    chosen, reason = await accelerator.choose(reactor, settings.accelerator, qemu, version, user, memory)
    if chosen == "kvm":
        version += f" on {_processor()}"  # copies see the node's own processor
    machine = Machine(
        qemu,
        version,
        chosen,
        settings.memory // MIB,
        settings.max_memory // MIB,
        settings.max_cpus,
        settings.cpu,
    )
    return machine, reason


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unknown processor"


def kept_network(path: Path, configured: str) -> IPv4Network:
    """The subnet that UpdateRuntimeConfig brought, unless the configuration has changed since."""
    try:
        kept = json.loads(path.read_bytes())
        if kept["configured"] == configured:
            return subnet(kept["pod_cidr"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InfranetesError):
        pass
    return subnet(configured)


def keep_network(path: Path, configured: str, network: IPv4Network) -> None:
    """Remember it for the next daemon."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps({"configured": configured, "pod_cidr": str(network)}) + "\n")
    beside.replace(path)


def as_ours(error: Exception) -> InfranetesError:
    """An error of the operating system in our own words; ours stay as they are."""
    if isinstance(error, InfranetesError):
        return error
    if isinstance(error, OSError):
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if error.errno in _FULL:
            return ResourceExhausted(f"the node's disk is full: {what}; make room")
        if isinstance(error, FileNotFoundError):
            return FailedPrecondition(f"a file of the provider is gone: {what}; restart Infranetes")
        return Unavailable(f"the node refuses: {what}")
    return InfranetesError(f"unexpected {type(error).__name__}: {error}")
