# SPDX-License-Identifier: Apache-2.0
"""What was refused to a pod, because it had used up its share of what the node's kernel has once for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.providers.interface import ICountsRefusals, RefusedPackets, Share
from infranetes_common.errors import NotFound


def refusals(providers: Providers, sandbox: Sandbox) -> Mapping[Share, RefusedPackets]:
    """Return it by share; shares that sufficed are left out."""
    provider = providers.of(sandbox.record).provider
    if not ICountsRefusals.providedBy(provider) or not sandbox.record.instance_id:
        return {}
    try:
        return cast(ICountsRefusals, provider).refusals(sandbox.record.instance_id)
    except NotFound:
        return {}
