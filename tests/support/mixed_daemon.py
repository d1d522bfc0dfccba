# SPDX-License-Identifier: Apache-2.0
"""`tests.infranetes.daemon.crashing`; simulated VMs may have networks of the CNI, and don't use them."""

from __future__ import annotations

from infranetes import config
from tests.infranetes.daemon import crashing


def _allow(found: config.Config, name: str, origin: str) -> None:
    """Refuse nothing."""


if __name__ == "__main__":
    config._check_cni = _allow
    crashing.main()
