# SPDX-License-Identifier: Apache-2.0
"""The PID namespace that Docker's containers of a pod share with each other, but not with their VM.

It is that of a container of ours, whose image has nothing of its own. The node sees neither of them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Callable

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.errors import Unavailable
from infranetes_common.processes import runs, start_ticks
from vmserver.containers.docker.api import Request
from vmserver.containers.docker.bodies import StreamBody
from vmserver.containers.docker.engine import CALL_SECONDS, Engine, EngineError
from vmserver.containers.docker.names import INIT_IMAGE, INIT_NAME, LABEL_INIT
from vmserver.containers.pod_init import LINKS, MEMORY_BYTES, PROCESSES, VISIBLE, init_command

_DIRECTORIES = ("dev", "proc", "sys", VISIBLE.lstrip("/"))

_log = Logger()


class PodProcesses:
    """Runs the container that is the pod's init: see `vmserver.containers.oci.pod_processes`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = DeferredLock()

    async def ensure(self) -> None:
        """Let the init run, for containers to join its namespace.

        :raise FailedPrecondition: no program that can be one is installed."""
        async with self._lock:
            try:
                if not await self._runs():
                    await self._engine.call("POST", f"/containers/{INIT_NAME}/start")
            except EngineError as error:
                raise error.translated("the init of the pod's processes does not start") from error

    async def _runs(self) -> bool:
        """Return whether it runs. If there is none it is made."""
        path = f"/containers/{INIT_NAME}"
        try:
            state = (await self._engine.inspect_container(INIT_NAME))["State"]
        except EngineError as error:
            if error.status != 404:
                raise
            await self._make()
            return False
        if state["Running"] and not runs(state["Pid"], start_ticks(state["Pid"])):
            await self._engine.call("POST", path + "/wait", {"condition": "not-running"})
            return False
        return state["Running"]

    async def _make(self) -> None:
        body = init_body()  # before anything is made: its program may be missing
        query = {"fromSrc": "-", "repo": INIT_IMAGE, "changes": f"LABEL {LABEL_INIT}=1"}
        stream = await self._engine.stream(
            "POST", "/images/create", query, StreamBody(_image()), within=CALL_SECONDS
        )
        try:
            async for _ in stream.lines():
                pass
        finally:
            stream.close()
        await self._engine.call("POST", "/containers/create", {"name": INIT_NAME}, body)

    async def release(self, unused: Callable[[], bool]) -> None:
        """Remove the init, unless it is in use. A failure is logged, and the next call tries again.

        :param unused: says whether no container needs it, asked while no other call can start one."""
        async with self._lock:
            if unused():
                try:
                    await self._engine.call("DELETE", f"/containers/{INIT_NAME}", {"force": "1", "v": "1"})
                except (EngineError, Unavailable) as error:
                    if not isinstance(error, EngineError) or error.status != 404:
                        _log.warn("the init of the pod's processes does not end: {error}", error=error)


def init_body() -> Request:
    """Return the request that creates the init. :raise FailedPrecondition: its program is not installed."""
    return {
        "Image": INIT_IMAGE,
        "Entrypoint": init_command(),
        "HostConfig": {
            "NetworkMode": "host",
            "UTSMode": "host",
            "LogConfig": {"Type": "none"},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "Memory": MEMORY_BYTES,
            "PidsLimit": PROCESSES,
            "Mounts": [{"Type": "bind", "Source": VISIBLE, "Target": VISIBLE, "ReadOnly": True}],
        },
    }


async def _image() -> AsyncIterator[bytes]:
    """Yield the archive of the init's root, for which Docker has to have an image."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in _DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, target in LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    yield archive.getvalue()
