# SPDX-License-Identifier: Apache-2.0
"""An agent that is killed: run as a program, with the directory, the image, and the number of a step.

It creates, starts, awaits and removes a container. It kills itself before or after that step, or ends with
code 0 if there are fewer steps.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet import task
from twisted.internet.defer import Deferred

from infranetes_common.concurrency import sleep
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from vmserver.containers.oci import conmon, launch, record
from vmserver.containers.oci.config import OciConfig
from vmserver.containers.oci.filesystems import FileSystems
from vmserver.containers.oci.pod_processes import PodProcesses
from vmserver.containers.oci.provider import OciProvider
from vmserver.containers.oci.runtime import Crun

ID = "victim"
STEPS: tuple[tuple[object, str], ...] = (
    (record, "save"),
    (FileSystems, "make"),
    (FileSystems, "unmount"),
    (FileSystems, "delete"),
    (launch.ConmonLaunch, "connectionMade"),
    (conmon.Conmon, "create"),
    (conmon.Conmon, "discard"),
    (Crun, "start"),
    (Crun, "run"),
    (PodProcesses, "release"),
)


def container_config(out: str) -> cri.ContainerConfig:
    """Return the config of a container that records that it ran."""
    mount = cri.Mount(container_path="/out", host_path=out)
    return cri.ContainerConfig(command=["sh", "-c", "echo ran >>/out/ran; exit 5"], mounts=[mount])


def killed_at(number: int) -> None:
    """Wrap the steps, so that before and after each the process can be killed."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def called(*args: Any, **more: Any) -> Any:
            step()
            result = real(*args, **more)
            step()
            return result

        @functools.wraps(real)
        async def awaited(*args: Any, **more: Any) -> Any:
            step()
            result = await real(*args, **more)
            step()
            return result

        return awaited if inspect.iscoroutinefunction(real) else called

    for owner, name in STEPS:
        setattr(owner, name, wrapped(getattr(owner, name)))


async def run(base: Path, crun: str, image_id: str) -> None:
    """Take a container through its life."""
    reactor = installed()
    config = OciConfig(crun=crun, directory=base / "oci", layer_dir=base / "layers")
    provider = OciProvider(reactor, config, base / "etc", base / "run")
    await provider.start()
    await provider.create(ID, image_id, container_config(str(base / "out")), cri.PodSandboxConfig())
    await provider.start_container(ID)
    while (await provider.containers())[0].state != cri.CONTAINER_EXITED:
        await sleep(reactor, 0.02)
    await provider.remove(ID)
    await provider.stop()


if __name__ == "__main__":
    killed_at(int(sys.argv[4]))
    task.react(lambda _: Deferred.fromCoroutine(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
