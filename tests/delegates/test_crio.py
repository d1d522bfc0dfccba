# SPDX-License-Identifier: Apache-2.0
"""CRI-O as the delegate: pods of both kinds, and VMs made from images that it has pulled."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread

from infranetes.delegate.crio_content import CrioContent
from infranetes.delegate.layer_source import ILayerSource
from infranetes.images.manifest import host_platform
from tests.contract import layer_source
from tests.delegates.crio import Crio
from tests.infranetes.daemon import test_delegate_images
from tests.infranetes.delegate.content_case import SocketCase, reactor
from tests.interop import test_delegate
from tests.interop.critest_images import PAUSE
from tests.interop.critest_runtimes import removed
from tests.support.oci import busybox
from tests.support.registry import Registry


class LayerSourceTests(layer_source.LayerSourceContract, SocketCase):
    """VMs are made from the layers that CRI-O has unpacked."""

    async def begin_process(self) -> Path:
        place = Path(tempfile.mkdtemp(prefix="inf-", dir="/var/tmp"))  # not on an overlay file system
        self.addCleanup(deferToThread, removed, place)
        await deferToThread(self.registry.push, *PAUSE, busybox())
        crio = Crio(place / "c")
        self.addCleanup(deferToThread, crio.end)
        await deferToThread(crio.start, self.registry)
        return crio.socket

    def source(self) -> ILayerSource:
        return CrioContent(reactor, self.runtime, self.directory / "tars", host_platform())

    def spelled(self, image_id: str) -> str:
        return image_id.removeprefix("sha256:")


class StoppableCrio:
    """A CRI-O with the interface that tests of images use."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._place = Path(tempfile.mkdtemp(prefix="inf-", dir="/var/tmp"))  # not on an overlay file system
        self._crio = Crio(self._place / "c")
        self.socket = self._crio.socket

    def start(self) -> None:
        self._crio.start(self._registry)

    def stop_process(self) -> None:
        self._crio.end()

    def stop(self) -> None:
        self._crio.end()
        removed(self._place)


class ImagesTests(test_delegate_images.DelegateImagesTests):
    """Its images, as the daemon uses them."""

    def make_delegate(self) -> StoppableCrio:
        return StoppableCrio(self.registry)

    def spelled(self, image_id: str) -> str:
        return image_id.removeprefix("sha256:")


class CrioTests(test_delegate.DelegateCase):
    """CRI-O."""

    name = "cri-o"
    version = r"1\."

    def runtime_in(self, root: Path) -> Crio:
        return Crio(root)

    async def test_pods_of_both_outlive_both(self) -> None:
        await self.pods_of_both_outlive_both()
