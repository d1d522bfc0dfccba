# SPDX-License-Identifier: Apache-2.0
"""Which volumes the configuration may lend to pods by flexVolume."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.config import VolumesConfig


class FlexVolumesTests(SynchronousTestCase):
    def test_all_a_namespaces_or_one_volume_of_a_namespace_can_be_lent(self) -> None:
        lent = ("*", "default", "a-1", "a" * 63, "default/vol-1")
        self.assertEqual(VolumesConfig(flexvolumes=lent).flexvolumes, lent)

    def test_anything_else_is_refused(self) -> None:
        for wrong in ("", "/", "/vol-1", "default/", "A", "-a", "a" * 64, "a_b/vol-1", "**"):
            self.assertIn(
                "NAMESPACE", str(self.assertRaises(ValueError, VolumesConfig, flexvolumes=(wrong,)))
            )
