# SPDX-License-Identifier: Apache-2.0
"""What simulated clouds need is fetched before benches have no network any more."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from bench.__main__ import _prepare
from tests.support.clouds import (
    azure_models,
    discovery,
    keystone_rules,
    neutron_attributes,
    nova_schemas,
    recorded,
)


class FetchTests(SynchronousTestCase):
    def test_each_bench_on_clouds_has_the_clouds_descriptions_fetched(self) -> None:
        asked: list[str] = []

        def wheel(name: str, pinned: str) -> Path:
            asked.append(name)
            return Path(name)

        self.patch(recorded, "wheel", wheel)
        names = ("volumes:gcp", "lives:gcp", "launches", "calls")
        for name in names:
            _prepare([name])
        modules = (discovery, keystone_rules, neutron_attributes, nova_schemas)
        wheels = [module.WHEEL for module in modules] + [azure_models.COMPUTE, azure_models.NETWORK]
        self.assertEqual(asked, wheels * len(names))

    def test_without_a_network_the_others_are_prepared_all_the_same(self) -> None:
        def wheel(name: str, pinned: str) -> Path:
            raise subprocess.CalledProcessError(1, ["pip", "download"])

        self.patch(recorded, "wheel", wheel)
        _prepare(["volumes:aws", "lives"])
