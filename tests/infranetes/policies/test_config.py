# SPDX-License-Identifier: Apache-2.0
"""The configuration's key for NetworkPolicies."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config, load
from infranetes_common.errors import ConfigError

KEY = "kubernetes.network_policies"


class ConfigTests(SynchronousTestCase):
    def test_they_do_not_hold_unless_asked_for(self) -> None:
        self.assertFalse(Config().kubernetes.network_policies)

    def test_they_need_an_api_server(self) -> None:
        error = self.assertRaises(ConfigError, load, None, {KEY: True})
        self.assertIn("set kubernetes.kubeconfig", str(error))
        self.assertTrue(load(None, {KEY: True, "kubernetes.kubeconfig": "/k"}).kubernetes.network_policies)
