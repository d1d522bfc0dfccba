# SPDX-License-Identifier: Apache-2.0
"""A test case with real QEMU VMs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infranetes.guest.image import DEFAULT_DIR
from infranetes.providers.interface import Instance
from infranetes.providers.qemu.network.bridge import Bridge
from infranetes.providers.qemu.program.process import pids_by_argument
from tests.contract.pod_provider_case import ProviderCase, reactor
from tests.e2e.pod_case import TEMPLATES, templates_of
from tests.harness.durations import slow
from tests.support.kept import KeptCase

IMAGES = Path(os.environ.get("INFRANETES_TEST_IMAGES", DEFAULT_DIR))
BRIDGE = "inftest0"
QEMU = "/usr/bin/qemu-system-x86_64"


_WITHOUT_AGENT_PORT = """#!/bin/bash
kept=()
while [ $# -gt 0 ]; do
    case "$2" in
        virtserialport,*name=infranetes.agent) shift 2;;
        *) kept+=("$1"); shift;;
    esac
done
exec %s "${kept[@]}"
"""


def without_agent_port(directory: Path) -> Mapping[str, str]:
    """Return a provider's settings with which VMs' agents have no port of their own, but a TCP port.

    :param directory: which QEMU's user can enter, for a wrapper of QEMU."""
    directory.chmod(0o755)
    path = directory / "qemu-without-agent-port"
    path.write_text(_WITHOUT_AGENT_PORT % QEMU)
    path.chmod(0o755)
    return {"qemu": str(path), "template_dir": templates_of("without-agent-port")}


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@slow(10, "its VMs are emulated where there is no KVM")
class QemuCase(KeptCase, ProviderCase):
    provider_name = "qemu"
    bridge = BRIDGE
    qemu = QEMU
    start_timeout = 900.0
    boot_timeout = 90.0
    agent_timeout = 60.0
    call_timeout = 90.0
    notice_timeout = 30.0
    interrupt_after = (0.0, 0.05, 0.3)
    timeout = 1800.0

    def setUp(self) -> Any:
        self.settings: dict[str, Any] = {
            "bridge": self.bridge,
            "image_dir": str(IMAGES),
            "template_dir": TEMPLATES,
            "pod_cidr": self.pod_cidr,
        }
        # QEMU's user can't enter a home directory, which this tree may be in.
        self.open_dir = Path(tempfile.mkdtemp(prefix="infranetes-"))
        return super().setUp()

    def kept_logs(self) -> Iterable[Path]:
        """Return the VMs' consoles, and what their QEMUs have said."""
        return self.vms().glob("*/*.log") if "state_dir" in vars(self) else ()

    def ways_in(self) -> Iterable[str]:
        """Return commands for each VM."""
        for directory in sorted(self.vms().glob("[!.]*")):
            pids = pids_by_argument([name := f"guest=infranetes-{directory.name}"]).get(name, [])
            yield f"tail -f {directory}/console.log    # of QEMU, process {pids}"
        yield f"ls {self.run_dir}/qemu    # their sockets"

    def table(self) -> Mapping[str, Any]:
        return self.settings

    def vms(self) -> Path:
        return self.state_dir / "qemu" / "vms"

    def pids(self, instance: Instance) -> list[int]:
        name = f"guest=infranetes-{instance.token}"
        return pids_by_argument([name]).get(name, [])

    async def end_from_outside(self, instance: Instance) -> None:
        [pid] = self.pids(instance)
        os.kill(pid, signal.SIGKILL)

    def wrapper(self, body: str) -> str:
        """Return a wrapper of QEMU that first runs `body`, a piece of shell, with QEMU's arguments."""
        self.open_dir.chmod(0o755)
        path = self.open_dir / f"qemu-{secrets.token_hex(4)}"
        path.write_text(f'#!/bin/bash\n{body}\nexec {self.qemu} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def break_launches(self) -> Callable[[], None]:
        """Give QEMU nothing to read in place of the template's state."""
        self.settings["qemu"] = self.wrapper('case "$*" in *defer*) exec 4</dev/null;; esac')
        return lambda: self.settings.update(qemu=self.qemu)

    def leftovers(self) -> list[str]:
        left = [f"directory {path}" for path in self.vms().iterdir()]
        left += [f"socket {path}" for path in (self.run_dir / "qemu").iterdir()]
        for link in json.loads(said("ip", "-j", "link", "show", "master", self.bridge)):
            left.append(f"tap {link['ifname']}")
        table = said("nft", "list", "table", "bridge", f"infranetes_{self.bridge}")
        if "elements" in table:
            left.append(f"leases {table}")
        for arguments in (each / "cmdline" for each in Path("/proc").glob("[0-9]*")):
            try:
                words = arguments.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(b"guest=infranetes-") for word in words):
                parent = arguments.parent
                if os.path.samefile(f"/proc/{os.getpid()}/ns/net", parent / "ns/net") and self.mine(parent):
                    left.append(f"process {parent.name}")
        return left

    def mine(self, process: Path) -> bool:
        """Return whether a process has a file of this test open."""
        try:
            return any(
                os.readlink(each).startswith(str(self.state_dir)) for each in (process / "fd").iterdir()
            )
        except OSError:
            return False

    async def finish(self) -> None:
        shutil.rmtree(self.open_dir)
        await Bridge(reactor, self.bridge, 0).remove()
