# SPDX-License-Identifier: Apache-2.0
"""CSI's Identity service."""

from __future__ import annotations

from collections.abc import Callable

from infranetes.csi.config import NAME
from infranetes_common import __version__
from infranetes_common.wire import csi
from infranetes_common.wire.csi_rpcs import IdentityRpcs
from txgrpc import Call

_SERVICE = csi.PluginCapability.Service
_EXPANSION = csi.PluginCapability.VolumeExpansion


class Identity(IdentityRpcs):
    """CSI's Identity service: one method per RPC. :param ready: whether the provider has started.
    :param has_places: whether only some nodes can use a volume; raises Unavailable until that is known."""

    def __init__(self, ready: Callable[[], bool], has_places: Callable[[], bool]) -> None:
        self._ready = ready
        self._has_places = has_places

    async def GetPluginInfo(self, request: csi.GetPluginInfoRequest, call: Call) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=NAME, vendor_version=__version__)

    async def GetPluginCapabilities(
        self, request: csi.GetPluginCapabilitiesRequest, call: Call
    ) -> csi.GetPluginCapabilitiesResponse:
        services = [_SERVICE.CONTROLLER_SERVICE]
        if self._has_places():
            services.append(_SERVICE.VOLUME_ACCESSIBILITY_CONSTRAINTS)
        found = [csi.PluginCapability(service=_SERVICE(type=each)) for each in services]
        found.append(csi.PluginCapability(volume_expansion=_EXPANSION(type=_EXPANSION.ONLINE)))
        return csi.GetPluginCapabilitiesResponse(capabilities=found)

    async def Probe(self, request: csi.ProbeRequest, call: Call) -> csi.ProbeResponse:
        return csi.ProbeResponse(ready=csi.BoolValue(value=self._ready()))
