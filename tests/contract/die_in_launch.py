# SPDX-License-Identifier: Apache-2.0
"""A process with one provider, as a daemon has it, that kills itself with SIGKILL some time into a launch.

`python -m tests.contract.die_in_launch JOB.json`; `tests.contract.interrupted_launches` writes the job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react

from infranetes.providers import registry
from infranetes.providers.interface import Attachment, InstanceSpec, ProviderContext, Size, VmRequest
from infranetes_common.identity import Identity
from infranetes_common.reactors import installed

reactor = installed()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _run(job: dict[str, Any]) -> None:
    context = job["context"]
    provider = registry.create(
        reactor,
        job["provider"],
        job["table"],
        ProviderContext(
            Path(context["state_dir"]), Path(context["run_dir"]), context["cluster"], context["node"]
        ),
    )
    spec = job["spec"]
    request = spec["request"]
    attachment = request["attachment"]
    await provider.configure_network(job["pod_cidr"])
    await provider.start(lambda words: None)
    launching = provider.launch(
        InstanceSpec(
            **{
                **spec,
                "identity": Identity(**spec["identity"]),
                "kept": spec["kept"] and Path(spec["kept"]),
                "request": VmRequest(
                    **{
                        **request,
                        "size": Size(**request["size"]),
                        "granted": frozenset(request["granted"]),
                        "attachment": attachment
                        and Attachment(Path(attachment["namespace"]), attachment["interface"]),
                    }
                ),
            },
        )
    )
    launching.addErrback(lambda failure: failure.printTraceback(file=sys.stderr))
    reactor.callLater(job["seconds"], _die)
    await Deferred()


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    react(lambda _: Deferred.fromCoroutine(_run(job)))
