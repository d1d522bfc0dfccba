# SPDX-License-Identifier: Apache-2.0
"""What benches on simulated clouds need of the network."""

from __future__ import annotations

import subprocess

from bench.figures import Missing
from tests.support.clouds import discovery, recorded


def fetch() -> None:
    """Have Google's description of its API, by which the simulated Compute Engine serves. Idempotent.

    :raise Missing: it can't be fetched."""
    try:
        recorded.wheel(discovery.WHEEL, discovery.PINNED)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"benches on Compute Engine need {discovery.WHEEL}: {error}") from error
