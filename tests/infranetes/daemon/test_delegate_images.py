# SPDX-License-Identifier: Apache-2.0
"""Pods in simulated VMs beside Debian's containerd, with one image store for both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.threads import deferToThread

from infranetes.config import Config
from infranetes.daemon.backends import make_backends
from infranetes.delegate.config import DelegateConfig
from infranetes.delegate.containerd_content import DISCARDED
from infranetes.images import ImagesConfig
from infranetes.providers.interface import ProviderContext
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.daemon.case import DaemonCase
from tests.infranetes.delegate.content_case import ContentCase, reactor
from tests.infranetes.images.support import small
from tests.support import oci
from tests.support.containerd import Containerd
from tests.support.registry import Registry
from txgrpc import Code

HANDLER = "infranetes"


class Stoppable(Protocol):
    """A runtime; see `Containerd` for these methods."""

    @property
    def socket(self) -> Path: ...
    def start(self) -> object: ...
    def stop_process(self) -> None: ...
    def stop(self) -> None: ...


class DelegateImagesCase(DaemonCase):
    """A daemon whose delegate is containerd, and a registry.

    :cvar discards: whether containerd deletes the layers that it has unpacked."""

    discards = False
    timeout = 600
    patience = 4.0  # three daemons and a registry are started one after the other
    unneeded = DaemonCase.unneeded | {"NetworkReady"}  # containerd's own pods don't have a network here

    async def setUp(self) -> None:
        super().setUp()
        self.registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, self.registry.stop)
        self.delegate = self.make_delegate()
        self.addCleanup(deferToThread, self.delegate.stop)
        await deferToThread(self.delegate.start)
        self.config["delegate"] = {"socket": str(self.delegate.socket)}
        self.config["times"] = {"sweep": 0.2}
        self.config["providers"]["simulated"]["images"] = "layers"
        await self.start()

    def make_delegate(self) -> Stoppable:
        """Return the delegate, not yet started."""
        return Containerd(self.discards)

    def spelled(self, image_id: str) -> str:
        """Return an image's id in the delegate's notation."""
        return image_id

    async def pulled(self, name: str, built: oci.BuiltImage) -> str:
        """Have kubelet pull an image. Return its reference."""
        reference = await deferToThread(self.registry.push, name, "1", built)
        request = cri.PullImageRequest(image=cri.ImageSpec(image=reference))
        answer = await self.image_service.PullImage(request, timeout=60.0 * self.patience)
        self.assertEqual(answer.image_ref, self.spelled(built.id))
        return reference

    async def run_in_vm(self, name: str = "web") -> str:
        (self.log_directory / name).mkdir(exist_ok=True)
        request = cri.RunPodSandboxRequest(config=self.pod(name), runtime_handler=HANDLER)
        return str((await self.runtime.RunPodSandbox(request, timeout=60.0 * self.patience)).pod_sandbox_id)

    def of(self, image: str, container: str = "main") -> Any:
        return self.box(container, "sleep 1000", image=cri.ImageSpec(image=image))

    def disks(self) -> set[str]:
        """Return the diff ids of layers that have a disk on the node."""
        return {"sha256:" + re.split("[-.]", path.name)[0] for path in self.files()}

    def inodes(self) -> set[int]:
        """Return the inode numbers of these disks."""
        return {path.stat().st_ino for path in self.files() if path.suffix != ".json"}

    def files(self) -> Iterator[Path]:
        """Yield the files of the disks, and those of their metadata."""
        return (self.root / "state" / "delegate-images" / "disks" / "sha256").iterdir()

    async def remove_image(self, name: str) -> None:
        request = cri.RemoveImageRequest(image=cri.ImageSpec(image=name))
        await self.image_service.RemoveImage(request, timeout=60.0 * self.patience)


@needs_mounts
@needs_registry
class DelegateImagesTests(DelegateImagesCase):
    """A containerd that keeps layers."""

    async def test_a_container_in_a_vm_is_of_an_image_that_the_delegate_pulled(self) -> None:
        built = oci.busybox()
        id = self.spelled(built.id)
        reference = await self.pulled("box", built)
        listed = (await self.image_service.ListImages(cri.ListImagesRequest(), timeout=10.0)).images
        self.assertEqual([image.id for image in listed], [id])
        sandbox = await self.run_in_vm()
        container = await self.run_container(sandbox, self.of(id))
        status = await self.container_status(container)
        self.assertEqual((status.image_id, status.image_ref, status.image.image), (id, id, id))
        [shown] = await self.containers()
        self.assertEqual(shown.image_id, listed[0].id)
        await self.run_container(sandbox, self.of(reference, "second"))
        self.assertEqual(self.disks(), set(built.diff_ids))

    async def test_an_image_that_is_removed_stays_in_vms_and_is_not_there_for_others(self) -> None:
        built = oci.busybox()
        await self.pulled("box", built)
        sandbox = await self.run_in_vm()
        container = await self.run_container(sandbox, self.of(self.spelled(built.id)))
        await self.remove_image(self.spelled(built.id))
        await self.until(lambda: not self.disks(), "its disks are removed")
        message = await self.refused(
            Code.NOT_FOUND, self.create(sandbox, self.of(self.spelled(built.id), "second"))
        )
        self.assertIn("is not on this node", message)
        self.assertEqual((await self.container_status(container)).state, cri.CONTAINER_RUNNING)
        await self.pulled("box", built)
        await self.run_container(sandbox, self.of(self.spelled(built.id), "second"))

    async def test_disks_outlive_the_daemon_and_a_tag_that_moves_means_another_image(self) -> None:
        upper: dict[str, bytes | tuple[str, str]] = {"etc/after": b"x", "etc/same": ("hard", "etc/passwd")}
        before, after = oci.busybox(), oci.busybox(extra=upper)
        reference = await self.pulled("moves", before)
        await self.run_container(await self.run_in_vm(), self.of(reference))
        [inode] = self.inodes()
        await self.restart()
        self.assertEqual(await self.pulled("moves", after), reference)
        sandbox = await self.run_in_vm("other")
        container = await self.run_container(sandbox, self.of(reference))
        self.assertEqual((await self.container_status(container)).image_id, self.spelled(after.id))
        self.assertEqual(self.disks(), {*before.diff_ids, *after.diff_ids})
        self.assertIn(inode, self.inodes())

    async def test_while_the_delegate_is_away_containers_run_and_none_is_made_of_its_images(self) -> None:
        built = oci.busybox()
        await self.pulled("box", built)
        sandbox = await self.run_in_vm()
        container = await self.run_container(sandbox, self.of(self.spelled(built.id)))
        await deferToThread(self.delegate.stop_process)
        message = await self.refused(
            Code.UNAVAILABLE, self.create(sandbox, self.of(self.spelled(built.id), "second"))
        )
        self.assertIn("does not answer", message)
        self.assertIn("delegate.socket in ", message)
        self.assertEqual((await self.container_status(container)).state, cri.CONTAINER_RUNNING)
        self.assertEqual(self.disks(), set(built.diff_ids))
        await deferToThread(self.delegate.start)
        await self.connect()
        await self.run_container(sandbox, self.of(self.spelled(built.id), "second"))


@needs_mounts
@needs_registry
class DiscardingTests(DelegateImagesCase):
    """containerd deletes layers that it has unpacked."""

    discards = True

    async def test_pods_in_vms_are_refused_in_one_sentence_until_it_does_not(self) -> None:
        sandbox = await self.run_in_vm()
        built = oci.busybox()
        await self.pulled("box", built)
        await self.pulled("other", oci.busybox({"Cmd": ["true"]}))
        await self.remove_image(oci.busybox({"Cmd": ["true"]}).id)  # triggers containerd's garbage collection
        message = await self.refused(Code.FAILED_PRECONDITION, self.create(sandbox, self.of(built.id)))
        self.assertIn("crictl rmi", message)
        await self.until(lambda: self.refused_last() is True, "it is looked at")
        self.assertEqual(await self.refused(Code.FAILED_PRECONDITION, self.run_in_vm("other")), DISCARDED)
        await self.remove_image(built.id)
        await self.until(lambda: self.refused_last() is False, "it is looked at again")
        await self.run_in_vm("other")

    def refused_last(self) -> bool | None:
        """Whether the daemon refused pods in VMs when it last looked. None: this has never changed.

        Not whether DISCARDED is in the log, since the message of a refused container contains that, too."""
        said: list[str] = re.findall(r"are (no longer )?refused because of the delegate's images", self.log)
        return not said[-1] if said else None


@needs_mounts
@needs_registry
class PreloadTests(ContentCase):
    """Images that every VM has from the start (`images.preload`)."""

    async def test_they_are_pulled_by_the_delegate_and_shown_as_disks(self) -> None:
        built = small("preloaded")
        reference = await deferToThread(self.registry.push, "preloaded", "1", built)
        config = Config(
            state_dir=self.directory / "state",
            delegate=DelegateConfig(socket=str(self.containerd.socket)),
            images=ImagesConfig(preload=(reference,)),
        )
        contexts: list[ProviderContext] = []

        def make(reactor: IReactor, name: str, table: Mapping[str, Any], context: ProviderContext) -> Any:
            contexts.append(context)

        backends = make_backends(reactor, config, make, "this test")
        assert backends.delegate is not None
        self.addCleanup(backends.delegate.stop)
        await backends.images.start()
        self.addCleanup(backends.images.stop)
        [context] = contexts
        assert context.preload_disks is not None and context.preload is not None
        disks = await context.preload_disks(lambda words: None)
        self.assertEqual([disk.name for disk in disks], [id[len("sha256:") :] for id in built.diff_ids])
        self.assertTrue(all(disk.path.exists() for disk in disks))
        self.assertIsNone(await context.preload(lambda words: None))
