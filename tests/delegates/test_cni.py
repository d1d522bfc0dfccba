# SPDX-License-Identifier: Apache-2.0
"""Real VMs in the networks that containerd 2 and CRI-O give pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.delegates.programs import use_built_containerd
from tests.delegates.test_shadows import CniCrio
from tests.e2e import test_namespaces


class ContainerdTests(test_namespaces.CniTests):
    """containerd 2."""

    def setUp(self) -> Any:
        use_built_containerd(self)
        return super().setUp()


class CrioTests(test_namespaces.CniTests):
    """CRI-O."""

    def runtime_in(self, root: Path, plugin: dict[str, object]) -> CniCrio:
        return CniCrio(root, plugin)
