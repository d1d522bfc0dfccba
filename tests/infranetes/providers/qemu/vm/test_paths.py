# SPDX-License-Identifier: Apache-2.0
"""Where the provider keeps its files."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.vm.paths import ProviderPaths


class PathsTests(SynchronousTestCase):
    """The state directory, and what the configuration puts elsewhere."""

    def test_templates_are_where_the_configuration_says_or_beside_the_vms(self) -> None:
        paths = ProviderPaths(Path("/state"), Path("/run/x"))
        for configured, where in ((None, Path("/state/templates")), (Path("/fast"), Path("/fast"))):
            self.assertEqual(paths.templates(configured), where)
            self.assertEqual(paths.kvm(configured), where / "kvm.json")
