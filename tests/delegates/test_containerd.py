# SPDX-License-Identifier: Apache-2.0
"""containerd 2 as the delegate: what is asked of Debian's elsewhere is asked of it here."""

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
    """What VMs are made of."""

    async def setUp(self) -> None:
        use_built_containerd(self)
        await super().setUp()


class ImagesTests(test_delegate_images.DelegateImagesTests):
    """Its images below the daemon."""

    async def setUp(self) -> None:
        use_built_containerd(self)
        await super().setUp()


class DiscardingTests(test_delegate_images.DiscardingTests):
    """It deletes layers that it has unpacked."""

    async def setUp(self) -> None:
        use_built_containerd(self)
        await super().setUp()
