# SPDX-License-Identifier: Apache-2.0
"""The template that VMs are cloned from now, and the QEMU that runs it and them."""

from __future__ import annotations

import attrs
from twisted.internet.defer import DeferredLock

from infranetes.guest import image as images
from infranetes.providers.interface import Progress
from infranetes.providers.qemu import start_checks
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template.maker import TemplateMaker
from infranetes.providers.qemu.template.preloaded import PreloadedImages
from infranetes.providers.qemu.template.template import Template
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes_common.reactors import IReactor


class CurrentTemplate:
    """Keeps a template that fits QEMU, the guest image and the configuration.

    :ivar template: None: there has been none yet. :ivar line: QEMU's command line; None: likewise.
    :ivar reason: why QEMU uses the accelerator that it uses; "": likewise."""

    def __init__(
        self, reactor: IReactor, settings: QemuSettings, paths: ProviderPaths, preloaded: PreloadedImages
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._paths = paths
        self._preloaded = preloaded
        self._lock = DeferredLock()
        self._maker: TemplateMaker | None = None
        self.template: Template | None = None
        self.line: CommandLine | None = None
        self.reason = ""

    async def start(self, user: QemuUser, progress: Progress) -> Template:
        """Find out what QEMU can do here, and have a template for that.

        :raise InfranetesError: VMs can't run here; says why."""
        settings, reactor, paths = self._settings, self._reactor, self._paths
        image, verdict = images.current(settings.image_dir), paths.kvm(settings.template_dir)
        line, self.reason = await start_checks.find_qemu(reactor, settings, user, image.kernel, verdict)
        progress(f"QEMU uses {line.accelerator}: {self.reason}")
        self.line = line
        await self._preloaded.gather(image, progress)
        if self._preloaded.archive is not None:
            self.line = attrs.evolve(line, preload=self._preloaded.archive.key)
        self._maker = TemplateMaker(
            reactor, settings, paths.templates(settings.template_dir), paths.run, user
        )
        return await self.intact(progress)

    async def intact(self, progress: Progress) -> Template:
        """Return the template, made again if its files were changed. Call `start` first."""
        if self.template is not None and self.template.intact():
            return self.template
        assert self._maker is not None
        assert self.line is not None
        async with self._lock:
            image, archive = images.current(self._settings.image_dir), self._preloaded.archive
            path = archive.path if archive else None
            self.template = await self._maker.get(self.line, image, progress, path)
            return self.template
