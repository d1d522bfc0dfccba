# SPDX-License-Identifier: Apache-2.0
"""An image of a machine's disk for registries, and what such an image is."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.python.failure import Failure

from infranetes.guest.container_disk import BuiltLayout, write_archive, write_layout
from infranetes.images.config import ImagesConfig, default_policy
from infranetes.images.machine.formats import HEAD_BYTES, compression_of
from infranetes.images.machine.limits import DiskLimits
from infranetes.images.machine.orders import Answer
from infranetes.images.machine.registry_disks import AGENT_LABEL, RegistryDisks
from infranetes.images.machine.workshop import DiskSource, Workshop
from infranetes.images.manifest import host_platform
from infranetes.images.reference import Reference, parse
from infranetes.images.skopeo import classify
from infranetes.images.store import ImageStore
from infranetes_common.commands import Command, run
from infranetes_common.concurrency import Coro, run_in_thread
from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Say = Callable[[str], None]

_MEDIA_TYPES = {
    "qcow2": "application/x-qcow2",
    "raw": "application/x-raw-disk-image",
    "iso": "application/x-iso9660-image",
}
_QEMU_IMG = "qemu-img"


@attrs.frozen
class ToBuild:
    """What is to be made.

    :ivar tag: the image's name in the registry. :ivar agent: our agent is in it.
    :ivar artifact: the image is the disk, rather than a container image that has it in /disk.
    :ivar output: the archive to write; None: none is. :ivar push: send it to the registry.
    :ivar insecure: the registry speaks plain http, or has an untrusted certificate.
    :ivar auth_file: of skopeo; "": its default.
    """

    disk: Path
    tag: str
    agent: bool = False
    artifact: bool = False
    output: Path | None = None
    push: bool = False
    insecure: bool = False
    auth_file: str = ""


@attrs.frozen
class Seen:
    """What an image's disk is. :ivar architectures: that UEFI's loaders are for; none: that is not told."""

    format: str
    virtual_size: int
    bios: bool
    uefi: bool
    agent: bool = False
    architectures: tuple[str, ...] = ()
    digest: str = ""

    @classmethod
    def of(cls, answer: Answer, agent: bool = False) -> Seen:
        its = answer.architectures
        return cls(answer.format, answer.virtual_size, answer.bios, answer.uefi, agent, its)


async def inspect_file(reactor: IReactor, disk: Path) -> Seen:
    """Look at a disk's file. :raise InfranetesError: it can't be used; says why."""
    workshop = Workshop(reactor, DiskLimits, _QEMU_IMG, "")
    if await run_in_thread(reactor, _is_plain, disk):
        return Seen.of(await workshop.look(disk, None, str(disk)))
    with tempfile.TemporaryDirectory(prefix="infranetes-") as work:
        source, target = DiskSource(file=disk), Path(work) / "disk"
        return Seen.of(await workshop.make(source, target, str(disk), lambda words: None))


async def inspect_reference(reactor: IReactor, name: str, insecure: bool, auth_file: str, say: Say) -> Seen:
    """Pull an image and look at its disk. :raise InfranetesError: it can't be used; says why."""
    registry = parse(name).registry
    with tempfile.TemporaryDirectory(prefix="infranetes-") as work:
        config = ImagesConfig(
            insecure_registries=(registry,) if insecure else (), auth_file=auth_file, attempts=1
        )
        store = ImageStore(reactor, work, config)
        machines = RegistryDisks(reactor, store, qemu_img=_QEMU_IMG)
        await store.start()
        try:
            await machines.start()
            image = await store.pull(name)
            base = await machines.base(image, say)
        finally:
            await machines.stop()
            await store.stop()
    return Seen(
        base.format.value,
        base.virtual_size,
        base.boots_by_bios,
        base.boots_by_uefi,
        base.has_agent,
        digest=image.repo_digests[0].rpartition("@")[2],
    )


async def build_image(reactor: IReactor, build: ToBuild, say: Say) -> BuiltLayout:
    """Make an image of a disk; write it to an archive, or push it, or both.

    :raise InvalidArgument: its name is none.
    :raise InfranetesError: the disk can't be used, or not be pushed; says why.
    """
    tag = parse(build.tag)
    if tag.digest:
        raise InvalidArgument(f"{build.tag!r} has a digest, which comes of the image; give a tag")
    seen = await inspect_file(reactor, build.disk)
    its = seen.architectures
    architecture = its[0] if len(its) == 1 and not seen.bios else host_platform().partition("/")[2]
    beside = build.output.absolute().parent if build.output is not None else None
    with tempfile.TemporaryDirectory(prefix=".infranetes-image-", dir=beside) as work:
        layout = Path(work) / "layout"
        labels = {AGENT_LABEL: "true"} if build.agent else {}
        built = await run_in_thread(
            reactor,
            write_layout,
            build.disk,
            layout,
            tag.tag,
            architecture,
            labels,
            say,
            _MEDIA_TYPES[seen.format] if build.artifact else "",
        )
        if build.push:
            say(f"pushing {tag}")
            await _push(reactor, layout, tag, build)
        if build.output is not None:
            await run_in_thread(reactor, write_archive, layout, build.output.absolute())
    return built


async def _push(reactor: IReactor, layout: Path, tag: Reference, wanted: ToBuild) -> None:
    words = ["skopeo", "--policy", default_policy(), "copy", "--quiet", "--preserve-digests"]
    if wanted.insecure:
        words.append("--dest-tls-verify=false")
    if wanted.auth_file:
        words.append(f"--dest-authfile={wanted.auth_file}")
    command = Command([*words, f"oci:{layout}:{tag.tag}", f"docker://{tag}"], None)
    output = await run(reactor, command)
    if output.code:
        raise classify(output.stderr.decode(errors="replace"), tag)


def _is_plain(disk: Path) -> bool:
    """Whether the programs that look at disks can read the file itself: others' users, if this is root."""
    with open(disk, "rb") as file:
        compressed = compression_of(file.read(HEAD_BYTES))
        closed = os.getuid() == 0 and not os.fstat(file.fileno()).st_mode & stat.S_IROTH
    return not (compressed or closed)


def in_reactor(work: Callable[[IReactor], Coro[T]]) -> T:
    """Do something in a reactor, which runs for it alone; return its result."""
    ended: list[T | Failure] = []

    def main(reactor: IReactor) -> Deferred[None]:
        return Deferred.fromCoroutine(work(reactor)).addBoth(ended.append)

    with contextlib.suppress(SystemExit):
        react(main, [])
    if not ended:
        raise KeyboardInterrupt
    result = ended[0]
    if isinstance(result, Failure):
        result.raiseException()
    return result
