# SPDX-License-Identifier: Apache-2.0
"""`tests.infranetes.daemon.crashing`, but simulated VMs may be configured with CNI networks, though they do
not use them."""

from __future__ import annotations

from collections.abc import Iterator

from infranetes.config import Config
from infranetes.config import rules as config_checks
from tests.infranetes.daemon import crashing


def _allow(config: Config, name: str) -> Iterator[str]:
    """Refuse nothing."""
    return iter(())


if __name__ == "__main__":
    config_checks._of_cni = _allow
    crashing.main()
