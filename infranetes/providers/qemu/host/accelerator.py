# SPDX-License-Identifier: Apache-2.0
"""Whether KVM works here, which guests have to prove: /dev/kvm may exist and guests hang all the same.

The first is 512 bytes: a boot sector that writes one byte to QEMU's exit port. The second is the guest
image's own kernel without a disk, which has to get as far as to miss that: a KVM that is itself in a virtual
machine may run the one and not the other. After some seconds they are killed; a process that can't even be
killed is left alone. The result is valid until the node reboots, or QEMU or the kernel changes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from twisted.logger import Logger

from infranetes.providers.qemu.host import kvm
from infranetes.providers.qemu.host.privileges import QemuUser, unprivileged
from infranetes_common.commands import Command, find_program, run
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition
from infranetes_common.reactors import IReactor

PROBE_SECONDS = 5.0
KERNEL_SECONDS = 20.0  # a boot takes 1 s under KVM, and 3 s where KVM itself is emulated
KERNEL_SAYS = b"Unable to mount root fs"
_PORT, _VALUE = 0xF4, 0x2A
_EXIT_CODE = (_VALUE << 1) | 1  # the exit code of QEMU's isa-debug-exit
# mov dx, port; mov al, value; out dx, al; hlt; jmp $-1
_CODE = bytes([0xBA, _PORT & 0xFF, _PORT >> 8, 0xB0, _VALUE, 0xEE, 0xF4, 0xEB, 0xFD])
BOOT_SECTOR = _CODE.ljust(510, b"\0") + b"\x55\xaa"

_log = Logger()


def probe_command(qemu: str, accelerator: str, disk: str) -> list[str]:
    """Return the command that runs the guest under `accelerator`."""
    return [
        *(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "16M"),
        *("-machine", f"pc,accel={accelerator}"),
        *("-device", f"isa-debug-exit,iobase={_PORT:#x},iosize=0x1"),
        *("-drive", f"file={disk},format=raw,if=ide,readonly=off,snapshot=on"),
    ]


async def probe(reactor: IReactor, qemu: str, accelerator: str, user: QemuUser, seconds: float) -> str:
    """Run the guest under `accelerator` as `user`. Returns why it did not run; "": it did."""
    with tempfile.NamedTemporaryFile(prefix="infranetes-proof-") as disk:
        disk.write(BOOT_SECTOR)
        disk.flush()
        os.chown(disk.name, user.uid, user.gid)
        words = probe_command(qemu, accelerator, disk.name)
        command = unprivileged(words, user, dies_with_parent=True, own_session=False)
        try:
            output = await run(reactor, Command(command, seconds))
        except DeadlineExceeded:
            return f"a guest hung for {seconds:g} s"
    return "" if output.code == _EXIT_CODE else output.message().partition("\n")[0]


def kernel_command(qemu: str, accelerator: str, kernel: str) -> list[str]:
    """Return the command that boots a kernel without a disk, which then says so and ends."""
    return [
        *(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "256M"),
        *("-machine", f"q35,accel={accelerator}", "-cpu", "host" if accelerator == "kvm" else "max"),
        *("-kernel", kernel, "-append", "console=ttyS0 quiet panic=-1", "-serial", "stdio"),
    ]


async def probe_kernel(
    reactor: IReactor, qemu: str, accelerator: str, user: QemuUser, kernel: Path, seconds: float
) -> str:
    """Boot a kernel under `accelerator` as `user`. Returns why it did not boot; "": it did."""
    # A copy, since the user may not be allowed to read the original.
    with tempfile.NamedTemporaryFile(prefix="infranetes-proof-") as copy:
        await run_in_thread(reactor, shutil.copyfile, kernel, copy.name)
        os.chown(copy.name, user.uid, user.gid)
        words = kernel_command(qemu, accelerator, copy.name)
        command = unprivileged(words, user, dies_with_parent=True, own_session=False)
        try:
            output = await run(reactor, Command(command, seconds))
        except DeadlineExceeded:
            return f"the guest's kernel hung for {seconds:g} s"
    return (
        "" if KERNEL_SAYS in output.stdout else f"the guest's kernel did not boot: {output.message()[-200:]}"
    )


async def choose(
    reactor: IReactor, accelerator: str, qemu: str, version: str, user: QemuUser, kernel: Path, cache: Path
) -> tuple[str, str]:
    """Choose kvm or tcg, and say why.

    :param accelerator: kvm, tcg or auto. :param kernel: the guest image's.
    :param cache: the file that the last result is kept in.
    :raise FailedPrecondition: kvm is wanted and does not work.
    """
    if accelerator == "tcg":
        return "tcg", "as configured"
    reason = await _kvm_fault(reactor, qemu, version, user, kernel, cache)
    if not reason:
        return "kvm", "a guest proved that it works"
    if accelerator == "kvm":
        raise FailedPrecondition(
            f"KVM is configured and does not work here: {reason}; set accelerator to auto"
        )
    return "tcg", f"no KVM: {reason}"


async def _kvm_fault(
    reactor: IReactor, qemu: str, version: str, user: QemuUser, kernel: Path, cache: Path
) -> str:
    conditions = _conditions(version, user.uid, kernel)
    if conditions is None:
        return f"there is no {kvm.KVM}"
    if closed := kvm.closed_to(user):
        return closed
    fault = _cached(cache, conditions)
    if fault is None:
        program = find_program(qemu)
        fault = await probe(reactor, program, "kvm", user, PROBE_SECONDS)
        fault = fault or await probe_kernel(reactor, program, "kvm", user, kernel, KERNEL_SECONDS)
        _log.info("KVM {verdict}", verdict=f"does not work: {fault}" if fault else "works")
        await run_in_thread(reactor, replace_file, cache, json.dumps({"asked": conditions, "fault": fault}))
    return fault


def _conditions(version: str, uid: int, kernel: Path) -> dict[str, object] | None:
    """Return the conditions under which a cached result is valid; None: there is no device."""
    try:
        status = os.stat(kvm.KVM)
    except OSError:
        return None
    booted = kernel.stat()
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "qemu": version,
        "user": uid,
        "device": [status.st_mode, status.st_uid, status.st_gid],
        "kernel": [booted.st_size, booted.st_mtime_ns],
    }


def _cached(cache: Path, conditions: dict[str, object]) -> str | None:
    try:
        result = json.loads(cache.read_bytes())
        return str(result["fault"]) if result["asked"] == conditions else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
