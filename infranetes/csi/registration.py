# SPDX-License-Identifier: Apache-2.0
"""The registration of the driver with kubelet, which calls it on a socket in its plugins_registry."""

from __future__ import annotations

from twisted.logger import Logger

from infranetes.csi.config import NAME
from infranetes_common.wire import pluginregistration as wire
from infranetes_common.wire.pluginregistration_rpcs import RegistrationRpcs
from txgrpc import Call

_VERSIONS = ("1.0.0",)  # of CSI, as kubelet compares them
_log = Logger()


class Registration(RegistrationRpcs):
    """kubelet's Registration service: one method per RPC.

    :param endpoint: the path of the driver's own socket."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def GetInfo(self, request: wire.InfoRequest, call: Call) -> wire.PluginInfo:
        return wire.PluginInfo(
            type="CSIPlugin", name=NAME, endpoint=self._endpoint, supported_versions=_VERSIONS
        )

    async def NotifyRegistrationStatus(
        self, request: wire.RegistrationStatus, call: Call
    ) -> wire.RegistrationStatusResponse:
        if request.plugin_registered:
            _log.info("kubelet has registered the volume driver {name}", name=NAME)
        else:
            _log.error(
                "kubelet refuses the volume driver {name}: {error}", name=NAME, error=request.error[:500]
            )
        return wire.RegistrationStatusResponse()
