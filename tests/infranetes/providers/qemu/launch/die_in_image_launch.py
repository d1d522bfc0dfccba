# SPDX-License-Identifier: Apache-2.0
"""A process with one provider, as a daemon has it, that kills itself with SIGKILL before a step of a launch.

`python -m tests.infranetes.providers.qemu.launch.die_in_image_launch JOB.json`; `test_images` writes the job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from twisted.internet.defer import Deferred
from twisted.internet.task import react

from infranetes.providers import registry
from infranetes.providers.interface import InstanceSpec, ProviderContext, VmRequest
from infranetes.providers.machine_images import BaseDisk, DiskFormat, ImageBoot
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.launch.image import ImageLaunches
from infranetes.providers.qemu.launch.uplink import UplinkOfRecord
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.record import VmRecords
from infranetes_common.identity import Identity
from infranetes_common.reactors import installed
from tests.support import boot_sector

reactor = installed()
STEPS: dict[str, tuple[type, str]] = {
    "start": (ImageLaunches, "_start"),
    "place": (Placement, "place"),
    "monitor": (VmConnections, "open_monitor"),
    "join": (UplinkOfRecord, "join"),
    "tell": (UplinkOfRecord, "tell"),
    "save": (VmRecords, "update"),
}


def _die(*args: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


async def _run(job: dict[str, Any]) -> None:  # Any: JSON
    context = job["context"]
    paths = Path(context["state_dir"]), Path(context["run_dir"])
    provider = registry.create(
        reactor, "qemu", job["table"], ProviderContext(*paths, context["cluster"], context["node"])
    )
    await provider.configure_network(job["pod_cidr"])
    await provider.start(lambda words: None)
    base = BaseDisk("sha256:0", Path(job["image"]), DiskFormat.RAW, boot_sector.SIZE, boots_by_bios=True)
    identity = Identity(sandbox_id="s", certificate_pem="", key_pem="", ca_pem="")
    request = VmRequest(boot=ImageBoot(base))
    where, name = STEPS[job["step"]]
    setattr(where, name, _die)
    spec = InstanceSpec(job["token"], "sandbox", context["cluster"], context["node"], identity, request)
    launching = provider.launch(spec)
    launching.addErrback(lambda failure: failure.printTraceback(file=sys.stderr))
    await Deferred()


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    react(lambda _: Deferred.fromCoroutine(_run(job)))
