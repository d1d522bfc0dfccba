# SPDX-License-Identifier: Apache-2.0
"""Makes templates, and removes those that are no longer used.

A template is made beside the others, and its directory renamed once it is complete and synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from infranetes.guest.image import GuestImage
from infranetes.providers.interface import Progress
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.process import WatchedProcess, pids_by_argument
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.template.boot import TemplateBoot
from infranetes.providers.qemu.template.template import IMAGES, Template, last_used, template_key
from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import DeadlineExceeded, ResourceExhausted
from infranetes_common.reactors import IReactor

_LOCK, _WORK = "lock", ".build-"
_PROCESS_NAME = "guest=infranetes-template-"
_MOST = 3  # templates that are kept: changing the configuration back and forth needs no boot
_SPACE_MIB = 1024  # of disk that has to be free, beside the RAM's size


class TemplateMaker:
    """Makes templates in `directory`, one at a time on the whole node.

    :param user: the user that QEMU runs as.
    """

    def __init__(
        self, reactor: IReactor, settings: QemuSettings, directory: Path, run_dir: Path, user: QemuUser
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._directory = directory
        self._run_dir = run_dir
        self._user = user

    async def get(
        self,
        command_line: CommandLine,
        image: GuestImage,
        progress: Progress,
        preload: Path | None = None,
    ) -> Template:
        """Return the template of that command line and image; make it if there is none.

        :param preload: the file of images to load into it, whose key is `command_line.preload`.
        :raise InfranetesError: it can't be made; nothing of it is left.
        """
        template = Template(self._directory / template_key(command_line, image), command_line, image)
        if not template.intact():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = await self._lock(progress)
            try:
                if not template.intact():
                    await self._make(template, progress, preload)
            finally:
                os.close(lock)
        template.mark_used()
        return template

    async def _lock(self, progress: Progress) -> int:
        """Wait for the directory's lock. Returns the descriptor that holds it."""
        deadline = self._reactor.seconds() + self._settings.template_timeout
        descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            waiting = False
            while not _try_lock(descriptor):
                if self._reactor.seconds() > deadline:
                    raise DeadlineExceeded(
                        f"another process has been making a template in {self._directory} for "
                        f"{self._settings.template_timeout:g} s; see whether it hangs"
                    )
                if not waiting:
                    progress("waiting for another daemon to make the template")
                    waiting = True
                await sleep(self._reactor, 0.5)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    async def _make(self, template: Template, progress: Progress, preload: Path | None) -> None:
        started = self._reactor.seconds()
        await self._remove_old(template)
        self._check_space()
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=self._directory))
        sockets = Path(tempfile.mkdtemp(prefix="template-", dir=self._run_dir))
        try:
            if preload is not None:
                await run_in_thread(self._reactor, shutil.copyfile, preload, work / IMAGES)
            name = _process_name(work)
            boot = TemplateBoot(
                self._reactor,
                self._settings,
                template,
                work,
                sockets,
                name,
                self._user,
                progress,
            )
            await boot.run()
            await run_in_thread(self._reactor, template.seal, work)
            await self._remove(template.directory)
            await run_in_thread(self._reactor, work.rename, template.directory)
            progress(f"the template is ready ({self._reactor.seconds() - started:.0f} s)")
        finally:
            await self._remove(work)
            await self._remove(sockets)

    def _check_space(self) -> None:
        needed = self._settings.memory + _SPACE_MIB * MIB
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise ResourceExhausted(
                f"{self._directory} has {free // MIB} MiB free, a template takes up to {needed // MIB} MiB; "
                "make room, or set providers.qemu.template_dir"
            )

    async def _remove_old(self, template: Template) -> None:
        """Remove what killed daemons left half made, and the templates beyond those used last. VMs go on with
        the files that they have open."""
        half_made = list(self._directory.glob(f"{_WORK}*"))
        names = [_process_name(each) for each in half_made]
        processes = await run_in_thread(self._reactor, pids_by_argument, names)
        for pids in processes.values():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    process = WatchedProcess(self._reactor, pid, lambda: None)
                    await process.kill().addTimeout(10.0, self._reactor)
        others = [each for each in self._directory.glob("[0-9a-f]*") if each != template.directory]
        old = sorted(others, key=last_used, reverse=True)[_MOST - 1 :]
        for each in (*half_made, *old):
            await self._remove(each)

    async def _remove(self, directory: Path) -> None:
        await run_in_thread(self._reactor, shutil.rmtree, directory, True)


def _process_name(work: Path) -> str:
    """Return the argument by which the QEMU that makes a template in `work` is found."""
    return f"{_PROCESS_NAME}{work.name.removeprefix(_WORK)}"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
