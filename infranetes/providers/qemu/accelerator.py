"""Whether KVM works here. /dev/kvm may be there and guests hang all the same, so a guest has to prove it.

The guest is 512 bytes: a boot sector that writes one byte to QEMU's exit port. It gets a few seconds
and is killed past them; a process that can't even be killed is left alone. The answer is kept for as
long as the node is up and QEMU is the same.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.logger import Logger

from infranetes.providers.qemu.machine import unprivileged
from infranetes.providers.qemu.process import find_program, run
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition

KVM = "/dev/kvm"
PROOF_SECONDS = 5.0
_PORT, _VALUE = 0xF4, 0x2A
_EXIT_CODE = (_VALUE << 1) | 1  # QEMU's isa-debug-exit
# mov dx, port; mov al, value; out dx, al; hlt; jmp $-1
_CODE = bytes([0xBA, _PORT & 0xFF, _PORT >> 8, 0xB0, _VALUE, 0xEE, 0xF4, 0xEB, 0xFD])
BOOT_SECTOR = _CODE.ljust(510, b"\0") + b"\x55\xaa"

_log = Logger()


def proof_command(qemu: str, accelerator: str, disk: str) -> list[str]:
    """QEMU with the guest that proves that `accelerator` works."""
    return [
        *(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "16M"),
        *("-machine", f"pc,accel={accelerator}"),
        *("-device", f"isa-debug-exit,iobase={_PORT:#x},iosize=0x1"),
        *("-drive", f"file={disk},format=raw,if=ide,readonly=off,snapshot=on"),
    ]


async def works(
    reactor: Any, qemu: str, accelerator: str, uid: int, gid: int, groups: Sequence[int], seconds: float
) -> str:
    """ "" if a guest ran under `accelerator` as that user, else why not."""
    with tempfile.NamedTemporaryFile(prefix="infranetes-proof-") as disk:
        disk.write(BOOT_SECTOR)
        disk.flush()
        os.chown(disk.name, uid, gid)
        command = proof_command(qemu, accelerator, disk.name)
        try:
            output = await run(reactor, unprivileged(command, uid, gid, groups, tied=True), seconds)
        except DeadlineExceeded:
            return f"a guest hung for {seconds:g} s"
    return "" if output.code == _EXIT_CODE else output.words().partition("\n")[0]


async def choose(
    reactor: Any, wanted: str, qemu: str, version: str, user: tuple[int, int, Sequence[int]], memory: Path
) -> tuple[str, str]:
    """kvm or tcg, and why.

    :param wanted: kvm, tcg or auto. :param memory: a file to remember the answer in.
    :raise FailedPrecondition: kvm is wanted and does not work.
    """
    if wanted == "tcg":
        return "tcg", "as configured"
    reason = await _kvm_fault(reactor, qemu, version, user, memory)
    if not reason:
        return "kvm", "a guest proved that it works"
    if wanted == "kvm":
        raise FailedPrecondition(
            f"KVM is configured and does not work here: {reason}; set accelerator to auto"
        )
    return "tcg", f"no KVM: {reason}"


async def _kvm_fault(
    reactor: Any, qemu: str, version: str, user: tuple[int, int, Sequence[int]], memory: Path
) -> str:
    asked = _question(version, user[0])
    if asked is None:
        return f"there is no {KVM}"
    fault = _remembered(memory, asked)
    if fault is None:
        fault = await works(reactor, find_program(qemu), "kvm", *user, PROOF_SECONDS)
        _log.info("KVM {verdict}", verdict=f"does not work: {fault}" if fault else "works")
        beside = memory.with_name(memory.name + ".new")
        beside.write_text(json.dumps({"asked": asked, "fault": fault}))
        beside.replace(memory)
    return fault


def _question(version: str, uid: int) -> dict[str, Any] | None:
    """What an answer holds for; None: there is nothing to ask."""
    try:
        status = os.stat(KVM)
    except OSError:
        return None
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "qemu": version,
        "user": uid,
        "device": [status.st_mode, status.st_uid, status.st_gid],
    }


def _remembered(memory: Path, asked: dict[str, Any]) -> str | None:
    try:
        kept = json.loads(memory.read_bytes())
        return str(kept["fault"]) if kept["asked"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
