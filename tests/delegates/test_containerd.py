# SPDX-License-Identifier: Apache-2.0
"""containerd 2 as the delegate: it passes here the tests that Debian's containerd passes elsewhere."""

from __future__ import annotations

from tests.contract import layer_source
from tests.delegates.programs import use_built_containerd
from tests.infranetes.daemon import test_delegate_images
from tests.infranetes.delegate import content_case
from tests.interop import test_delegate


class Containerd2Tests(test_delegate.ContainerdTests):
    """Pods of both kinds."""

    version = r"v?2\."

    def setUp(self) -> None:
        use_built_containerd(self)
        super().setUp()


class LayerSourceTests(layer_source.LayerSourceContract, content_case.ContentCase):
    """The images that VMs are made from."""

    async def setUp(self) -> None:
        use_built_containerd(self)
        await super().setUp()


class ImagesTests(test_delegate_images.DelegateImagesTests):
    """Its images, as the daemon uses them."""

    async def setUp(self) -> None:
        use_built_containerd(self)
        await super().setUp()


class DiscardingTests(test_delegate_images.DiscardingTests):
    """Its images if it deletes layers that it has unpacked."""

    async def setUp(self) -> None:
        use_built_containerd(self)
        await super().setUp()
