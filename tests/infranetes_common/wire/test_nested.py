# SPDX-License-Identifier: Apache-2.0
"""Messages and enums inside of messages, whatever the release of protobuf."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import csi


class NestedTests(SynchronousTestCase):
    def test_they_are_attributes_of_what_they_are_in(self) -> None:
        mode = csi.VolumeCapability.AccessMode(mode=csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
        whole = csi.VolumeCapability(access_mode=mode)
        self.assertEqual(csi.VolumeCapability.FromString(whole.SerializeToString()).access_mode, mode)
        self.assertEqual(csi.VolumeCapability.AccessMode.Mode.Name(mode.mode), "SINGLE_NODE_WRITER")
