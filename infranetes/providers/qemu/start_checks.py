# SPDX-License-Identifier: Apache-2.0
"""What is checked and made before the provider starts: root, programs, QEMU, directories, the lock."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from infranetes.guest import reporting
from infranetes.guest.image import NoGuestImage
from infranetes.providers.interface import Awaited
from infranetes.providers.qemu.host import accelerator
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes_common.commands import Command, check, find_program
from infranetes_common.concurrency import lock_file_within
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor

LOCK_SECONDS = 5.0  # for a daemon that was killed, or is about to stop, to release the state directory

# Programs, and the Debian packages that contain them.
_PROGRAMS = {
    "setsid": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "bridge": "iproute2",
    "nft": "nftables",
}


def check_rights() -> None:
    """Check that this is root and that the programs are installed.

    :raise FailedPrecondition: it is not root. :raise Unavailable: a program is missing.
    """
    if os.geteuid() != 0:
        raise FailedPrecondition(
            "the QEMU provider needs root, for bridge and taps; QEMU itself gets no rights"
        )
    for program, package in _PROGRAMS.items():
        _find(program, package)


def _find(program: str, package: str) -> str:
    """Find a program. :raise Unavailable: it is not installed yet: its package is only recommended."""
    try:
        return find_program(program)
    except FailedPrecondition as error:
        raise Unavailable(f"{error}: apt-get install {package}") from None


def without_image(directory: Path, error: NoGuestImage) -> Unavailable:
    """Return the error of a start that waits because there is no guest image in its directory."""
    build = reporting.read(directory)
    if build is None:
        return Unavailable(str(error))
    if build.under_way:
        return Awaited(f"the guest image, which is being built: {build.words}")
    return Unavailable(f"{error}; the last build was not completed: {build.words}")


def make_directories(paths: ProviderPaths, templates: Path) -> None:
    """Make the provider's directories. :raise FailedPrecondition: one can't be made."""
    for path in (paths.state, paths.run, paths.vms, templates):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{path} can't be made: {error.strerror}; see state_dir and run_dir"
            ) from error


async def take_lock(clock: IReactorTime, paths: ProviderPaths) -> int:
    """Lock this state directory. Returns the descriptor that holds the lock while it is open.

    :raise FailedPrecondition: another daemon holds it.
    """
    try:
        return await lock_file_within(clock, paths.lock, LOCK_SECONDS)
    except BlockingIOError:
        raise FailedPrecondition(
            f"another daemon uses {paths.state}; stop it, or give this one a state_dir of its own"
        ) from None


async def find_qemu(
    reactor: IReactor, settings: QemuSettings, user: QemuUser, kernel: Path, kvm_cache: Path
) -> tuple[CommandLine, str]:
    """Find QEMU and choose its accelerator. Returns the command line, and why it has that accelerator.

    :param kernel: the guest image's.
    :raise FailedPrecondition: KVM is configured and does not work. :raise Unavailable: QEMU is missing.
    """
    qemu = _find(settings.qemu, "qemu-system-x86")
    _find(settings.qemu_img, "qemu-utils")
    version = (await check(reactor, Command([qemu, "--version"], 30.0))).decode().splitlines()[0]
    chosen, reason = await accelerator.choose(
        reactor, settings.accelerator, qemu, version, user, kernel, kvm_cache
    )
    if chosen == "kvm":
        version += f" on {_processor()}"  # under KVM, guests see the node's own processor
    command_line = CommandLine(
        qemu,
        version,
        chosen,
        settings.memory // MIB,
        settings.max_memory // MIB,
        settings.max_cpus,
        settings.cpu,
        disk_mib=settings.disk // MIB,
        code_mib=settings.code_cache // MIB,
    )
    return command_line, reason


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unknown processor"
