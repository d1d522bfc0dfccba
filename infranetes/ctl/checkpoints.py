# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl checkpoint`: a pod as it runs, in a file of the node."""

from __future__ import annotations

import json
from pathlib import Path

from infranetes.ctl.session import DONE, Session
from infranetes_common.wire import control

SECONDS = 600.0


async def checkpoint(session: Session) -> int:
    """Have the daemon write the checkpoint, and say how large it is. :raise GrpcError: the daemon refuses."""
    options = session.options
    location = str(Path.cwd() / options.file)  # the daemon is elsewhere
    request = control.CheckpointPodRequest(pod=options.pod, location=location)
    made = await session.stub.CheckpointPod(request, timeout=SECONDS)
    if options.json:
        session.print(json.dumps(_document(made, location), indent=2))
    else:
        session.print(
            f"{location}: {made.size / 2**20:.0f} MiB, pod {made.vm.namespace}/{made.vm.name}; its VM was "
            f"stopped for {made.pause_seconds:.3f} s of {made.seconds:.1f}"
        )
    return DONE


def _document(made: control.CheckpointPodResponse, location: str) -> dict[str, object]:
    return {
        "sandbox_id": made.vm.sandbox_id,
        "namespace": made.vm.namespace,
        "name": made.vm.name,
        "vm_id": made.vm.vm_id,
        "file": location,
        "bytes": made.size,
        "pause_seconds": made.pause_seconds,
        "seconds": made.seconds,
    }
