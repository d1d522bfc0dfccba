# SPDX-License-Identifier: Apache-2.0
"""The zones in which a pod's VM may be launched."""

from __future__ import annotations

from collections.abc import Sequence

from infranetes_common.errors import FailedPrecondition


def zones_for(within: str, zones: Sequence[str], provider: str) -> Sequence[str]:
    """Return the zones to try. :param within: that of the pod's volumes; "": it has none.

    :param zones: those of the configuration of `provider`.
    :raise FailedPrecondition: the volumes are in another zone."""
    if within and within not in zones:
        raise FailedPrecondition(
            f"the pod's volumes are in zone {within}, and this node makes VMs in "
            f"{', '.join(zones) or 'no zone'} only: add the zone to zones in providers.{provider}, or let "
            "the pod run on a node that has it"
        )
    return [within] if within else zones
