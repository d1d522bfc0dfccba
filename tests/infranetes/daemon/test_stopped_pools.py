# SPDX-License-Identifier: Apache-2.0
"""Configurations whose pools have VMs that wait stopped: accepted, or refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.daemon.config_check import check_daemon
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import installed

STOPPED = {"sizes": [{"stopped": 2}]}
AWS = {"region": "eu-west-1", "image": "ami-0123456789abcdef0"}
SPOT = {"infranetes.io/spot": "true"}


class StoppedPoolConfigurationTests(SynchronousTestCase):
    """`stopped` in the sizes of a pool."""

    def check(self, **table: Any) -> None:
        state = Path(self.mktemp()).absolute()
        directories = {"state_dir": str(state), "run_dir": "/run/infranetes-test"}  # nothing is made there
        config = structure({**directories, **table}, Config, source="the file")
        check_daemon(installed(), config, "the file")

    def refused(self, **table: Any) -> str:
        return str(self.assertRaises(ConfigError, self.check, **table))

    def test_clouds_and_simulated_vms_can_have_some(self) -> None:
        self.check(provider="simulated", pool=STOPPED)
        self.check(provider="aws", providers={"aws": AWS}, pool=STOPPED)

    def test_vms_of_the_node_can_not(self) -> None:
        words = self.refused(provider="qemu", pool=STOPPED)
        self.assertIn("the file: pool.sizes: stopped: VMs of provider qemu can't be stopped", words)
        self.assertIn("`count`", words)
        self.check(provider="qemu", pool={"sizes": [{"count": 2, "stopped": 0}]})

    def test_spot_vms_of_a_handler_can_not(self) -> None:
        handler = {"annotations": {"set": SPOT}, "pool": STOPPED}
        words = self.refused(provider="aws", providers={"aws": AWS}, handlers={"cheap": handler})
        self.assertIn("the file: handlers.cheap.pool.sizes: stopped: annotation infranetes.io/spot", words)

    def test_less_than_none_is_nothing(self) -> None:
        words = self.refused(provider="simulated", pool={"sizes": [{"stopped": -1}]})
        self.assertIn("stopped", words)
