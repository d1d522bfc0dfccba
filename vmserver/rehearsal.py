"""One container's whole life, before a template is frozen.

The first container of a machine waits for what no later one does: programs read from disk, kernel modules
loaded, the engine's own first times. A clone that has these from its template starts its first container
as others start their second. The image is made of the machine's own shell and is gone afterwards.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from infranetes_common import cri
from vmserver.containers.interface import IContainerProvider

#: Seconds for all of it; a machine under emulation takes most of a minute.
SECONDS = 240.0

_ID = "rehearsal"
_PIECE = 64 * 1024
_PROGRAMS = {"bin/sh": "/bin/sh", "bin/sleep": "/bin/sleep"}
_LIBRARIES = ("/lib64/ld-linux-*.so.*", "/lib/ld-linux-*.so.*", "/lib/*-linux-gnu/libc.so.6")

_log = Logger()


async def rehearse(reactor: Any, provider: IContainerProvider) -> None:
    """Run one container through `provider`. What fails is told to the log and harms nothing."""
    begun = reactor.seconds()
    try:
        image_id, archive = await deferToThreadPool(reactor, reactor.getThreadPool(), _image)
        life: Deferred[None] = Deferred.fromCoroutine(_live(provider, image_id, archive))
        await life.addTimeout(SECONDS, reactor)
        _log.info("a container's life was rehearsed in {seconds:.1f} s", seconds=reactor.seconds() - begun)
    except Exception as error:
        _log.warn(
            "a container's life could not be rehearsed: {kind}: {error}",
            kind=type(error).__name__,
            error=error,
        )


async def _live(provider: IContainerProvider, image_id: str, archive: bytes) -> None:
    config = cri.ContainerConfig(
        metadata=cri.ContainerMetadata(name=_ID), command=["/bin/sh", "-c", "echo begun; sleep 3600"]
    )
    try:
        await provider.load_image(image_id, _pieces(archive))
        await provider.create(_ID, image_id, config, cri.PodSandboxConfig())
        await provider.start_container(_ID)
        await provider.exec_sync(_ID, ["/bin/sh", "-c", ":"], SECONDS, _PIECE)
        await provider.stop_container(_ID, 0)
        records = provider.read_log(_ID, "", False)
        async for _ in records:
            pass
    finally:
        await provider.remove(_ID)
        await provider.remove_image(image_id)


def _image() -> tuple[str, bytes]:
    """The image's id and its `docker load` archive (source: moby/moby image/spec/v1.2.md)."""
    layer = _tar({name: _read(path) for name, path in _PROGRAMS.items()} | _libraries())
    config = json.dumps(
        {
            "architecture": "",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    digest = hashlib.sha256(config).hexdigest()
    manifest = json.dumps([{"Config": f"{digest}.json", "Layers": ["layer.tar"], "RepoTags": []}]).encode()
    members = {f"{digest}.json": config, "layer.tar": layer, "manifest.json": manifest}
    return f"sha256:{digest}", _tar(members)


def _libraries() -> dict[str, bytes]:
    paths = [path for pattern in _LIBRARIES for path in glob.glob(pattern)]
    return {path.lstrip("/"): _read(path) for path in paths}


def _read(path: str) -> bytes:
    with open(os.path.realpath(path), "rb") as file:
        return file.read()


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


async def _pieces(archive: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(archive), _PIECE):
        yield archive[at : at + _PIECE]
