# SPDX-License-Identifier: Apache-2.0
"""The first container, which is slower than all later ones, run before a template is frozen or a pod comes.

A machine's first container waits for programs to be read from the disk, for kernel modules to be loaded and
for caches of the engine. A clone has these from its template, and where its processor is emulated it
translates all code anew. The container has the machine's own shell, in its image or, where images are made
of layers, by mounts; container and image are removed again.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Sequence

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread, within
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from vmserver.containers.interface import IContainerProvider, ITakesLayers

#: Seconds for the whole warm-up, which takes most of a minute in a machine under emulation.
SECONDS = 240.0

#: The providers whose containers have images.
WARMED = ("docker", "oci")
_ID = "prewarm"
_CHUNK = 64 * 1024
_PROGRAMS = {"bin/sh": "/bin/sh", "bin/sleep": "/bin/sleep"}
_DIRECTORIES = ("/bin", "/lib", "/lib64", "/usr")  # the directories of programs and libraries
_LIBRARIES = ("/lib64/ld-linux-*.so.*", "/lib/ld-linux-*.so.*", "/lib/*-linux-gnu/libc.so.6")

_log = Logger()


async def run_first_container(
    reactor: IReactor, provider: IContainerProvider, dropped: Sequence[str] = ()
) -> None:
    """Run one container from its creation to its removal, by a provider whose containers have images.

    A failure is only logged.

    :param dropped: capabilities that it does without. The default profile of seccomp depends on them, and the
        provider keeps what crun has compiled of it.
    """
    if provider.name not in WARMED:
        return
    begun = reactor.seconds()
    try:
        await within(reactor, SECONDS, _prepare_and_run(reactor, provider, dropped), "the first container")
        _log.info("the first container has run, in {seconds:.1f} s", seconds=reactor.seconds() - begun)
    except Exception as error:
        _log.warn(
            "the first container could not be run: {kind}: {error}",
            kind=type(error).__name__,
            error=error,
        )


async def _prepare_and_run(reactor: IReactor, provider: IContainerProvider, dropped: Sequence[str]) -> None:
    # As kubelet asks for most containers: without the init of a pod's shared processes.
    context = cri.LinuxContainerSecurityContext(
        namespace_options=cri.NamespaceOption(pid=cri.CONTAINER),
        seccomp=cri.SecurityProfile(profile_type=cri.SecurityProfile.RuntimeDefault),
        capabilities=cri.Capability(drop_capabilities=dropped),
    )
    if ITakesLayers.providedBy(provider):
        configuration = _configuration([])
        image_id = _digest(configuration)
        await _run(provider, image_id, provider.add_image(image_id, configuration), _mounts(), context)
    else:
        image_id, archive = await run_in_thread(reactor, _image)
        await _run(provider, image_id, provider.load_image(image_id, _chunks(archive)), [], context)


async def _run(
    provider: IContainerProvider,
    image_id: str,
    loading: Deferred[None],
    mounts: Sequence[cri.Mount],
    context: cri.LinuxContainerSecurityContext,
) -> None:
    config = cri.ContainerConfig(
        metadata=cri.ContainerMetadata(name=_ID),
        command=["/bin/sh", "-c", "echo begun; sleep 3600"],
        mounts=mounts,
        linux=cri.LinuxContainerConfig(security_context=context),
    )
    try:
        await loading
        await provider.create(_ID, image_id, config, cri.PodSandboxConfig())
        await provider.start_container(_ID)
        await provider.exec_sync(_ID, ["/bin/sh", "-c", ":"], SECONDS, _CHUNK)
        await provider.stop_container(_ID, 0)
        records = provider.read_log(_ID, "", False)
        async for _ in records:
            pass
    finally:
        await provider.remove(_ID)
        await provider.remove_image(image_id)


def _image() -> tuple[str, bytes]:
    """Return the image's id and its `docker load` archive (source: moby/moby image/spec/v1.2.md)."""
    layer = _tar({name: _read(path) for name, path in _PROGRAMS.items()} | _libraries())
    config = _configuration([_digest(layer)])
    digest = _digest(config).removeprefix("sha256:")
    manifest = json.dumps([{"Config": f"{digest}.json", "Layers": ["layer.tar"], "RepoTags": []}]).encode()
    members = {f"{digest}.json": config, "layer.tar": layer, "manifest.json": manifest}
    return f"sha256:{digest}", _tar(members)


def _mounts() -> list[cri.Mount]:
    """Return mounts of the machine's own programs and libraries."""
    present = [path for path in _DIRECTORIES if os.path.isdir(path)]
    return [cri.Mount(container_path=path, host_path=path, readonly=True) for path in present]


def _configuration(diff_ids: list[str]) -> bytes:
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    return json.dumps({"architecture": "", "os": "linux", "config": {}, "rootfs": rootfs}).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


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


async def _chunks(archive: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(archive), _CHUNK):
        yield archive[at : at + _CHUNK]
