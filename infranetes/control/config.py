# SPDX-License-Identifier: Apache-2.0
"""The calls of ``proto/control.proto`` about the configuration that is in force."""

from __future__ import annotations

from infranetes.config.in_force import ConfigInForce, InForce, Origin
from infranetes_common.concurrency import run_in_thread
from infranetes_common.config_text import Setting
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlConfigRpcs
from txgrpc import Call

_NANOS = 10**9


class ConfigCalls(ControlConfigRpcs):
    """One method per RPC."""

    def __init__(self, reactor: IReactor, config_in_force: ConfigInForce) -> None:
        self._reactor = reactor
        self._config_in_force = config_in_force

    async def GetConfig(self, request: control.GetConfigRequest, call: Call) -> control.GetConfigResponse:
        now = self._config_in_force.now
        keys = await run_in_thread(self._reactor, lambda: [*now.entries()])
        return control.GetConfigResponse(
            files=now.read.sources.files,
            reloaded_at=int(now.read_at * _NANOS),
            trouble=now.trouble,
            keys=map(_key, keys),
        )


def _key(in_force: InForce) -> control.ConfigKey:
    key = control.ConfigKey(key=in_force.key, reloaded=in_force.reloaded, waits=in_force.waiting is not None)
    if in_force.setting is not None:
        key.in_force.CopyFrom(_setting(in_force.setting, in_force.origin))
    if in_force.waiting is not None and in_force.waiting.setting is not None:
        key.waiting.CopyFrom(_setting(in_force.waiting.setting, in_force.waiting.origin))
    return key


def _setting(setting: Setting, origin: Origin) -> control.Setting:
    place = origin.place
    shown = control.Origin(command_line=origin.flag)
    if place is not None and not origin.flag:
        shown.file, shown.line = place.file, place.line
    return control.Setting(value=setting.shown, secret=setting.secret, origin=shown)
