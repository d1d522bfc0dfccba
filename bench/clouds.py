# SPDX-License-Identifier: Apache-2.0
"""What benches on simulated clouds need of the network."""

from __future__ import annotations

import subprocess

from bench.figures import Missing
from tests.support.clouds import (
    azure_models,
    discovery,
    keystone_rules,
    neutron_attributes,
    nova_schemas,
    recorded,
)


def fetch() -> None:
    """Have the clouds' descriptions of their APIs, by which the simulated ones serve. Idempotent.

    :raise Missing: one can't be fetched."""
    modules = (discovery, keystone_rules, neutron_attributes, nova_schemas)
    wheels = {module.WHEEL: module.PINNED for module in modules} | azure_models.PINNED
    for name, pinned in wheels.items():
        try:
            recorded.wheel(name, pinned)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Missing(f"benches on clouds need {name}: {error}") from error
