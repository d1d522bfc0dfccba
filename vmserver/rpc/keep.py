# SPDX-License-Identifier: Apache-2.0
"""Hold, Release and Adopt: the containers stand still while their machine is kept, and in its clones."""

from __future__ import annotations

import math

from infranetes_common import cpusets
from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentKeepRpcs
from txgrpc import Call
from vmserver import validate
from vmserver.containers.hooks import hook
from vmserver.keeping.holding import Adoption, Holding, Wanted
from vmserver.rpc import bounds

MAX_SECONDS = 3600.0
MAX_CONTAINERS = 256
MAX_VOLUMES = 1024


class KeepCalls(AgentKeepRpcs):
    """Validates requests. :param holding: None: the machine is shared, and can't be kept."""

    def __init__(self, holding: Holding | None) -> None:
        self._holding = holding

    async def Hold(self, request: messages.HoldRequest, call: Call) -> messages.HoldResponse:
        if not (math.isfinite(request.seconds) and 0 < request.seconds <= MAX_SECONDS):
            raise InvalidArgument(
                f"seconds {request.seconds}: expected more than 0 and at most {MAX_SECONDS:g}"
            )
        if len(request.hooks) > MAX_CONTAINERS or len(request.volumes) > MAX_VOLUMES:
            raise InvalidArgument(f"over {MAX_CONTAINERS} hooks or {MAX_VOLUMES} volumes")
        hooks = {validate.container_id(id): hook(f"hooks[{id}]", said) for id, said in request.hooks.items()}
        volumes = {validate.container_id(id) for id in request.volumes}
        wanted = Wanted(hooks, volumes, request.keep_secrets, request.seconds)
        return messages.HoldResponse(containers=await self._own().hold(wanted))

    async def Release(self, request: messages.ReleaseRequest, call: Call) -> messages.ReleaseResponse:
        await self._own().release()
        return messages.ReleaseResponse()

    async def Adopt(self, request: messages.AdoptRequest, call: Call) -> messages.AdoptResponse:
        if len(request.containers) > MAX_CONTAINERS or len(request.volumes) > MAX_VOLUMES:
            raise InvalidArgument(f"over {MAX_CONTAINERS} containers or {MAX_VOLUMES} volumes")
        adoptions = [_adoption(index, each) for index, each in enumerate(request.containers)]
        volumes = {
            validate.container_id(each.old_id): validate.container_id(each.new_id) for each in request.volumes
        }
        states = await self._own().adopt(adoptions, volumes, request.sandbox_config)
        return messages.AdoptResponse(containers=map(bounds.state, states))

    def _own(self) -> Holding:
        if self._holding is None:
            raise Unimplemented("the agent shares this machine, so it can't be kept")
        return self._holding


def _adoption(index: int, said: messages.Adoption) -> Adoption:
    config = said.config
    for env in config.envs:
        if not env.key or "=" in env.key or "\0" in env.key or b"\0" in env.value:
            raise InvalidArgument(
                f"containers[{index}].config.envs: {env.key[:80]!r} is no name of a variable, or has a NUL"
            )
    if config.linux.HasField("resources"):
        cpusets.clear(config.linux.resources)
    told = hook(f"containers[{index}].hook", said.hook) if said.HasField("hook") else None
    return Adoption(validate.container_id(said.old_id), validate.container_id(said.new_id), config, told)
