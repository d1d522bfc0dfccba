# SPDX-License-Identifier: Apache-2.0
"""Images are published to the content library of a simulated vCenter, and become templates for pods."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.publish.interface import ImageLabel, Publication, Published
from infranetes.publish.plan import scan
from infranetes.publish.vsphere import VspherePublisher
from infranetes.publish.vsphere_command import publisher
from infranetes.publish.vsphere_library import Shelf
from infranetes_common import config
from infranetes_common.errors import AlreadyExists, InfranetesError, Unavailable
from tests.infranetes.providers.cloud.vsphere.test_library import LibraryCase
from tests.infranetes.publish import disks
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.library import DEPLOY

STEPS = ("create", "_endpoint", "_put", "fill")


class Killed(Exception):
    """Raised where the command is killed."""


class PublishTests(LibraryCase, TestCase):
    """What a publication makes, and what interrupted publications leave."""

    def setUp(self) -> Any:
        result = super().setUp()
        self.disk = disks.make(Path(self.mktemp()) / "disk.raw", {7: b"seven"}, 64 << 20)
        self.publication = Publication(scan(self.disk), ImageLabel("docker"))
        self.reported: list[str] = []
        self.opened: list[VspherePublisher] = []
        self.ended = False
        self.addCleanup(setattr, self, "ended", True)
        return result

    async def clean_up(self) -> None:
        if self.providers:
            return await super().clean_up()
        await self.finish()  # no VM was created
        shutil.rmtree(self.run_dir)

    async def finish(self) -> None:
        for each in self.opened:
            await deferToThread(each.close)
        self.library.adopt_items()
        await super().finish()

    def pause(self, seconds: float) -> None:
        if self.ended:
            raise Killed
        time.sleep(min(seconds, 0.02))

    def publisher(self, **more: Any) -> VspherePublisher:
        settings = config.structure({**self.settings, **more}, Settings, source="test")
        made = publisher(settings)
        self.patch(made, "_sleep", self.pause)
        self.opened.append(made)
        return made

    def publish(self, label: ImageLabel | None = None) -> Deferred[Published]:
        publication = Publication(self.publication.disk, label) if label else self.publication
        return deferToThread(self.publisher().publish, publication, self.reported.append)

    async def test_the_disk_becomes_an_item_and_a_template_whose_clones_are_pods(self) -> None:
        kept: list[bytes] = []
        self.world.rest.on_file = kept.append
        made = await self.publish()
        asked = self.asked(DEPLOY)
        self.assertEqual(await self.publish(), made)  # a repetition makes nothing
        self.assertEqual((self.asked(DEPLOY), len(self.library.items())), (asked, 1))
        envelope, vmdk = kept
        self.assertIn(b"streamOptimized", envelope)
        file, raw = Path(self.mktemp()), Path(self.mktemp())
        file.write_bytes(vmdk)
        subprocess.run(["qemu-img", "convert", "-f", "vmdk", "-O", "raw", str(file), str(raw)], check=True)
        self.assertEqual(scan(raw).digests, self.publication.disk.digests)
        self.assertEqual(made.settings, {"image": f"{self.world.folder}/images/{made.title}"})
        template = self.template(made.title)
        self.assertIsNotNone(template.snapshot)
        kinds = [type(each).__name__ for each in template.config.hardware.device]
        self.assertIn("vim.vm.device.ParaVirtualSCSIController", kinds)
        self.assertIn("vim.vm.device.VirtualDisk", kinds)
        self.settings["image"] = made.settings["image"]
        provider = await self.started()
        await self.running(provider, self.spec())
        self.assertEqual(self.world.asked("CloneVM_Task")[-1]["this"], template._moId)
        self.assertEqual([path.name for path in self.disk.parent.iterdir()], ["disk.raw"])
        self.assertIn("100 %", "\n".join(self.reported))

    async def test_an_image_that_is_a_pod_is_found_by_its_name(self) -> None:
        made = await self.publish(ImageLabel("machine", "web:1.0"))
        self.assertEqual(made.settings, {})
        provider: Any = await self.started()
        found = await self.pulled(provider, "web:1.0")
        self.assertEqual(found.machine, self.template("web-1.0").config.instanceUuid)

    async def test_an_untrusted_vcenter_or_another_item_of_the_name_is_refused(self) -> None:
        distrustful = self.publisher(ca_file="/etc/ssl/certs/ca-certificates.crt")
        distrust = await self.assertFailure(deferToThread(distrustful.images), InfranetesError)
        self.assertIn("certificate can't be verified", str(distrust))
        self.library.put_ovf("web-1.0")
        error = await self.assertFailure(self.publish(ImageLabel("machine", "web:1.0")), AlreadyExists)
        self.assertIn("web-1.0", str(error))

    async def test_killed_at_each_step_the_next_run_goes_on_and_nothing_is_left(self) -> None:
        for number, step in enumerate(STEPS):
            disk = disks.make(self.disk.with_name(f"{step}.raw"), {3: b"%d" % number}, 64 << 20)
            self.publication = Publication(scan(disk), ImageLabel("docker"))
            original = getattr(Shelf, step)

            def die(*arguments: Any, original: Any = original) -> None:
                original(*arguments)
                raise Killed

            patched = self.patch(Shelf, step, die)
            await self.assertFailure(self.publish(), Killed)
            patched.restore()
            made = await self.publish()
            self.template(made.title)
            self.assertEqual(len(self.library.items()), number + 1, step)
            self.assertEqual([path.name for path in disk.parent.glob(f"{disk.name}*")], [disk.name])

    async def test_a_lost_deployment_is_gone_on_with(self) -> None:
        self.world.faults.add(FaultKind.LOST, DEPLOY, times=1)
        await self.assertFailure(self.publish(), Unavailable)
        made = await self.publish()
        self.assertEqual(self.made(), [made.title])

    async def test_images_are_listed_and_removed(self) -> None:
        made = await self.publish()
        [image] = await deferToThread(self.publisher(image=made.image).images)
        self.assertEqual((image.kind, image.title), ("docker", made.title))
        self.assertEqual(image.used_by, "the configuration names its template")
        [image] = await deferToThread(self.publisher().images)
        self.assertEqual(image.used_by, "")
        for _ in range(2):
            await deferToThread(self.publisher().remove, image)
        self.assertEqual(self.library.items(), [])
        self.template(made.title)
