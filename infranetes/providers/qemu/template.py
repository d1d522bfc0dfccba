"""The template: a machine booted once, stopped when its agent asks for an identity, and kept as RAM,
device state and disk. Each pod's VM starts as a copy of it.

A template belongs to one guest image, one QEMU and one set of machine parameters: its directory's name
is a hash of them. It is made beside the others and renamed when it is whole and on the medium. The
files' inodes and change times are in the manifest: a template that anyone has touched since is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from infranetes.guest.image import GuestImage
from infranetes.providers.qemu import record
from infranetes.providers.qemu.descriptors import Descriptors
from infranetes.providers.qemu.machine import LINK, Fd, Machine, User, inputs, unprivileged
from infranetes.providers.qemu.network import open_tap
from infranetes.providers.qemu.once import Once
from infranetes.providers.qemu.process import Watched, check, find_program, named, spawn
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.sockets import connect
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
    Unavailable,
)

PARTS = ("ram", "state", "disk.qcow2", "overlay.qcow2")
_IMAGES = "images"  # one more part of a template with images
_MANIFEST, _LOCK, _WORK, _USED = "manifest.json", "lock", ".build-", "used"
_NAME = "guest=infranetes-template-"
_KEPT = 3  # templates beside each other; a change of the configuration back and forth costs no boot
_SPACE_MIB = 1024  # of disk beside the RAM
_QUIET_SECONDS, _QUIET_SHARE = 2.0, 0.15  # a machine that uses less of a processor has finished booting
_SETTLE_SECONDS = 30.0

_log = Logger()
Progress = Callable[[str], None]


@attrs.frozen
class Template:
    """A whole template on disk."""

    directory: Path
    machine: Machine
    image: GuestImage

    @property
    def overlay(self) -> Path:
        """An empty disk over the template's; each VM gets a copy."""
        return self.directory / "overlay.qcow2"

    def open(self, descriptors: Descriptors) -> None:
        """Open what a copy needs. :raise OSError: something is missing."""
        descriptors.open(Fd.RAM, self.directory / "ram", os.O_RDWR)
        descriptors.open(Fd.STATE, self.directory / "state")
        descriptors.open(Fd.TEMPLATE_DISK, self.directory / "disk.qcow2")
        self.open_images(descriptors)

    def open_images(self, descriptors: Descriptors, directory: Path | None = None) -> None:
        """Open what it was booted from. `directory`: where its own parts still are while it is made."""
        descriptors.open(Fd.IMAGE_DISK, self.image.disk)
        descriptors.open(Fd.KERNEL, self.image.kernel)
        descriptors.open(Fd.INITRD, self.image.initrd)
        if self.machine.preload:
            descriptors.open(Fd.IMAGES, (directory or self.directory) / _IMAGES)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its own files."""
        return (*PARTS, _IMAGES) if self.machine.preload else PARTS

    def whole(self) -> bool:
        """Whether it is there and as it was made."""
        try:
            manifest = json.loads((self.directory / _MANIFEST).read_bytes())
            return bool(manifest["parts"] == self.states(self.directory))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def states(self, directory: Path) -> dict[str, list[int]]:
        """What tells its files from such as were touched since. :raise OSError: one is missing."""
        image = self.image
        paths = [*(directory / part for part in self.parts), image.disk, image.kernel, image.initrd]
        found = {}
        for path in paths:
            status = path.stat()
            found[path.name if path.parent == directory else str(path)] = [
                status.st_size,
                status.st_ino,
                status.st_ctime_ns,
            ]
        return found


class TemplateMaker:
    """Makes templates in `directory`, one at a time on the whole node.

    :param user: whom QEMU runs as: user, group, other groups.
    """

    def __init__(
        self,
        reactor: Any,
        settings: QemuSettings,
        directory: Path,
        run_dir: Path,
        user: User,
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._directory = directory
        self._run_dir = run_dir
        self._user = user

    def _thread(self, function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function, *arguments)

    async def get(
        self, machine: Machine, image: GuestImage, progress: Progress, images: Path | None = None
    ) -> Template:
        """The template of that machine and image, made if there is none.

        :param images: the file of images that are loaded into it, where `machine.preload` names them.

        :raise InfranetesError: it can't be made; nothing is left of it.
        """
        key = hashlib.sha256("\0".join(inputs(machine, image.key)).encode()).hexdigest()[:24]
        template = Template(self._directory / key, machine, image)
        if not template.whole():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = await self._lock(progress)
            try:
                if not template.whole():
                    await self._make(template, progress, images)
            finally:
                os.close(lock)
        (template.directory / _USED).touch()
        return template

    async def _lock(self, progress: Progress) -> int:
        deadline = self._reactor.seconds() + self._settings.template_timeout
        descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        said = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if self._reactor.seconds() > deadline:
                    os.close(descriptor)
                    raise DeadlineExceeded(
                        f"another process has been making a template in {self._directory} for "
                        f"{self._settings.template_timeout:g} s; see whether it hangs"
                    ) from None
            if not said:
                progress("waiting for another daemon to make the template")
                said = True
            await deferLater(self._reactor, 0.5, lambda: None)

    async def _make(self, template: Template, progress: Progress, images: Path | None) -> None:
        started = self._reactor.seconds()
        await self._sweep(template)
        self._check_space()
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=self._directory))
        sockets = Path(tempfile.mkdtemp(prefix="template-", dir=self._run_dir))
        name = f"{_NAME}{work.name.removeprefix(_WORK)}"
        try:
            if images is not None:
                await self._thread(shutil.copyfile, images, work / _IMAGES)
            boot = _Boot(self._reactor, self._settings, template, work, sockets, name, self._user, progress)
            await boot.run()
            await self._thread(seal, work, template)
            await self._thread(shutil.rmtree, template.directory, True)
            await self._thread(work.rename, template.directory)
            progress(f"the template is ready ({self._reactor.seconds() - started:.0f} s)")
        finally:
            await self._thread(shutil.rmtree, work, True)
            await self._thread(shutil.rmtree, sockets, True)

    def _check_space(self) -> None:
        needed = self._settings.memory + _SPACE_MIB * MIB
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise ResourceExhausted(
                f"{self._directory} has {free // MIB} MiB free, a template takes up to {needed // MIB} MiB; "
                "make room, or set providers.qemu.template_dir"
            )

    async def _sweep(self, template: Template) -> None:
        """What a maker that was killed left, and templates that nobody has used for long. Files that a
        VM has open stay readable to it."""
        left = list(self._directory.glob(f"{_WORK}*"))
        processes = await self._thread(named, [f"{_NAME}{each.name.removeprefix(_WORK)}" for each in left])
        for pids in processes.values():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    await Watched(self._reactor, pid, lambda: None).kill().addTimeout(10.0, self._reactor)
        others = [each for each in self._directory.glob("[0-9a-f]*") if each != template.directory]
        old = sorted(others, key=_last_used, reverse=True)[_KEPT - 1 :]
        for each in (*left, *old):
            await self._thread(shutil.rmtree, each, True)


def _last_used(directory: Path) -> float:
    try:
        return (directory / _USED).stat().st_mtime
    except OSError:
        return 0.0


def seal(work: Path, template: Template) -> None:
    """Have all on the medium, then the manifest."""
    for part in template.parts:
        path = work / part
        os.chown(path, 0, -1)
        path.chmod(0o660 if part == "ram" else 0o644)
        _sync(path)
    manifest = {"parts": template.states(work), "made_at": time.time(), "image": template.image.key}
    (work / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _sync(work / _MANIFEST)
    _sync(work)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Boot:
    """One boot of a template, in the directory `work`."""

    def __init__(
        self,
        reactor: Any,
        settings: QemuSettings,
        template: Template,
        work: Path,
        sockets: Path,
        name: str,
        user: User,
        progress: Progress,
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._template = template
        self._work = work
        self._sockets = sockets
        self._name = name
        self._user = user
        self._progress = progress

    async def run(self) -> None:
        """Boot, freeze, end.

        :raise InfranetesError: a step failed; its words and the console's end.
        """
        process: Watched | None = None
        try:
            await self._make_disk()
            with Descriptors() as descriptors:
                self._open(descriptors)
                command = [find_program(self._settings.qemu), "-name", self._name]
                command += self._template.machine.template()
                pid = spawn(
                    self._reactor, unprivileged(command, *self._user, tied=True), descriptors.by_number()
                )
            process = Watched(self._reactor, pid, lambda: None)
            await self._freeze(process)
        except (InfranetesError, OSError) as error:
            said = record.tail(self._work / record.OUTPUT) or record.tail(self._work / record.CONSOLE)
            words = f"; the machine's last words: {said}" if said else ""
            kind = type(error) if isinstance(error, InfranetesError) else Unavailable
            raise kind(f"the template could not be made: {error}{words}") from error
        finally:
            if process is not None:
                await process.kill().addTimeout(10.0, self._reactor)

    async def _make_disk(self) -> None:
        image = self._settings.qemu_img
        layers = (
            ("disk.qcow2", "raw", str(self._template.image.disk)),
            ("overlay.qcow2", "qcow2", "disk.qcow2"),
        )
        for name, kind, backing in layers:
            command = [
                image,
                "create",
                "-q",
                "-f",
                "qcow2",
                "-F",
                kind,
                "-b",
                backing,
                str(self._work / name),
            ]
            await check(self._reactor, command, 60.0)

    def _open(self, descriptors: Descriptors) -> None:
        uid, gid, _ = self._user
        for name in ("ram", "disk.qcow2", record.CONSOLE):
            (self._work / name).touch(0o600)
            os.chown(self._work / name, uid, gid)
        os.truncate(self._work / "ram", self._template.machine.memory_mib * MIB)
        descriptors.standard(self._work / record.OUTPUT)
        descriptors.open(Fd.RAM, self._work / "ram", os.O_RDWR)
        descriptors.open(Fd.DISK, self._work / "disk.qcow2", os.O_RDWR)
        descriptors.open(Fd.CONSOLE, self._work / record.CONSOLE, os.O_RDWR)
        self._template.open_images(descriptors, self._work)
        descriptors.add(Fd.TAP, open_tap(f"inft{os.getpid()}"))
        descriptors.listen(Fd.QMP, self._sockets / "qmp")
        descriptors.listen(Fd.IDENTITY, self._sockets / "identity")

    async def _freeze(self, process: Watched) -> None:
        qmp, port = await connect(self._reactor, self._sockets)
        try:
            await qmp.execute("cont", 60.0)
            await self._booted(port.waiting)
            await self._settled(process.pid)
            self._progress("keeping the template's state")
            await qmp.execute("set_link", name=LINK, up=False)
            await qmp.execute("stop")
            await qmp.execute(
                "migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}]
            )
            await qmp.execute("migrate-set-parameters", max_bandwidth=1 << 40)
            state = os.open(self._work / "state", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                await qmp.hand("state", state)
            finally:
                os.close(state)
            await qmp.execute("migrate", uri="fd:state")
            await self._kept(qmp)
            await qmp.execute("quit")
        finally:
            qmp.close()
            port.close()

    async def _booted(self, waiting: Once[None]) -> None:
        started = self._reactor.seconds()
        timeout = self._settings.template_timeout
        while not waiting.happened:
            seconds = self._reactor.seconds() - started
            if seconds > timeout:
                raise DeadlineExceeded(f"its agent did not ask for an identity in {timeout:g} s")
            if int(seconds) % 10 == 0:
                self._progress(
                    f"booting the template, once for all pods ({seconds:.0f} s; one to three minutes)"
                )
            await deferLater(self._reactor, 1.0, lambda: None)
        await waiting.wait()

    async def _settled(self, pid: int) -> None:
        """Wait until the machine has nothing more to do, or for a while."""
        deadline = self._reactor.seconds() + _SETTLE_SECONDS
        ticks = os.sysconf("SC_CLK_TCK") * _QUIET_SECONDS
        while self._reactor.seconds() < deadline:
            before = _processor_ticks(pid)
            await deferLater(self._reactor, _QUIET_SECONDS, lambda: None)
            if (_processor_ticks(pid) - before) / ticks < _QUIET_SHARE:
                return

    async def _kept(self, qmp: Any) -> None:
        deadline = self._reactor.seconds() + 60.0
        while True:
            answer = await qmp.execute("query-migrate")
            if answer.get("status") == "completed":
                return
            if answer.get("status") == "failed" or self._reactor.seconds() > deadline:
                raise Unavailable(
                    f"its state can't be kept: {answer.get('error-desc', answer.get('status'))}"
                )
            await deferLater(self._reactor, 0.1, lambda: None)


def _processor_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise Unavailable("QEMU ended") from None
    return int(fields[11]) + int(fields[12])


def check_directory(path: Path) -> None:
    """:raise FailedPrecondition: templates can't be kept there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(
            f"{path} can't be made: {error.strerror}; see providers.qemu.template_dir"
        ) from error
