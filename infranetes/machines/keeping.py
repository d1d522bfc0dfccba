# SPDX-License-Identifier: Apache-2.0
"""What the node asks of a VM's agent when the VM is kept, and of the agent in a clone of a kept VM.

Keeping a pod's VM: `hold`; then keep the VM; then bring the volumes that `hold` has emptied; then `release`.
The last two are done whatever becomes of the others.

In a clone: once the agent has its new identity, `adopt` what the new pod can use, and `remove` the rest by
the ids of the pod that was kept. The agent does not list these, so nobody takes them for containers of the
new pod. Then bring the volumes, and `start`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from attrs.validators import ge, gt, le
from zope.interface import Interface

from infranetes_common.wire import cri, vmserver

MAX_HOOK_SECONDS = 600.0
MAX_HOLD_SECONDS = 3600.0


@attrs.frozen
class Hook:
    """What a container is told before it is kept, or in a clone once it goes on.

    :ivar command: a command, which has to end with 0; empty: there is a signal.
    :ivar signal: the number of a signal for its first process; 0: there is a command.
    :ivar seconds: what the command may take; after a signal, what is waited.
    """

    command: tuple[str, ...] = ()
    signal: int = attrs.field(default=0, validator=[ge(0), le(64)])
    seconds: float = attrs.field(default=30.0, validator=[gt(0.0), le(MAX_HOOK_SECONDS)])

    def __attrs_post_init__(self) -> None:
        if bool(self.command) == bool(self.signal):
            raise ValueError("a hook is a command or a signal")


@attrs.frozen
class Adoption:
    """A kept container that is given to a new pod.

    :ivar old_id: its id in the pod that was kept. :ivar new_id: its id from now on.
    :ivar config: as for `IContainerAgent.create`. :ivar hook: run by `start`, once it goes on.
    """

    old_id: str
    new_id: str
    config: cri.ContainerConfig
    hook: Hook | None = None


class IKeepAgent(Interface):
    """Holding a pod's containers still while its VM is kept, and giving them to another pod in a clone.

    All calls raise NotOffered if the VM's containers can't be held.
    """

    async def hold(
        hooks: Mapping[str, Hook], volumes: Collection[str], *, keep_secrets: bool = False, seconds: float
    ) -> list[str]:
        """Run the hooks, and hold all containers still; return the ids of those that ran. Idempotent.

        Until `release`, their processes don't run, nothing of the network reaches the VM or leaves it, and
        commands are refused. After an error nothing is held, but `volumes` may be empty: bring them.

        :param hooks: by container. Those of containers that don't run are left out.
        :param volumes: volumes in memory that the node has the contents of, such as secrets. They are
            emptied: bring them again before `release`.
        :param keep_secrets: the pod wants them kept as they are; nothing is emptied.
        :param seconds: how long it may take, at most MAX_HOLD_SECONDS.
        :raise FailedPrecondition: something of the pod can't be kept, or a hook has failed; says which.
        :raise DeadlineExceeded: it takes longer than `seconds`."""

    async def release() -> None:
        """Let held containers go on. Idempotent.

        :raise FailedPrecondition: this is a clone, whose kept containers are another pod's."""

    async def adopt(
        containers: Sequence[Adoption], volumes: Mapping[str, str], sandbox: cri.PodSandboxConfig
    ) -> list[vmserver.ContainerState]:
        """In a clone, give kept containers to its pod; return their states, in the same order. Idempotent.

        They are CREATED, and don't run until `start`.

        :param volumes: the new ids of the volumes that they have, by their old ones. They are in the VM under
            the new id then, as they were kept: empty, or with what was not emptied.
        :param sandbox: the new pod's configuration, as for `create`.
        :raise NotFound: no such container was kept.
        :raise InvalidArgument: the configuration differs in what can't be changed; says in what.
        :raise FailedPrecondition: this is no clone."""
