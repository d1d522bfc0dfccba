# SPDX-License-Identifier: Apache-2.0
"""The configuration's table `[csi]`, and the sockets that follow from it."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.csi.config import CsiConfig


class CsiConfigTests(SynchronousTestCase):
    def test_the_sockets_are_where_kubelet_looks_for_them(self) -> None:
        config = CsiConfig("/var/lib/kubelet")
        self.assertEqual(config.socket, "/var/lib/kubelet/plugins/infranetes.io/csi.sock")
        registration = "/var/lib/kubelet/plugins_registry/infranetes.io-reg.sock"
        self.assertEqual(config.registration_socket, registration)
        longest = CsiConfig("/" + "x" * 59)
        self.assertLessEqual(max(map(len, (longest.socket, longest.registration_socket))), 107)

    def test_there_is_no_driver_unless_it_is_asked_for(self) -> None:
        self.assertEqual(Config().csi.kubelet_dir, "")

    def test_a_directory_that_cannot_be_is_refused(self) -> None:
        for wrong in ("var/lib/kubelet", "/" + "x" * 60):
            with self.assertRaisesRegex(ValueError, "kubelet_dir"):
                CsiConfig(wrong)
