# SPDX-License-Identifier: Apache-2.0
"""The user namespace that the containers of a pod share."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.defer import DeferredLock

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.reactors import IReactor
from infranetes_common.user_namespaces import UserNamespace, user_namespace
from infranetes_common.wire import cri
from vmserver.containers import security
from vmserver.containers.accounts import ProcessUser
from vmserver.machine.id_mapped import keep_namespace

_OF_NETWORK = frozenset(("CAP_NET_ADMIN", "CAP_NET_RAW"))
FIELD = "security_context.namespace_options"


class UserNamespaces:
    """Keeps user namespaces: one for each mapping of ids, and so one for a pod.

    :param directory: emptied by a reboot, which ends the namespaces too.
    """

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._lock = DeferredLock()

    async def get(self, users: UserNamespace) -> Path:
        """Return the file of a user namespace, which is made if there is none.

        :raise FailedPrecondition: it can't be made."""
        name = "-".join(str(part) for ids in (users.uids, users.gids) for part in (ids.first, ids.length))
        at = self._directory / name
        async with self._lock:
            await run_in_thread(self._reactor, keep_namespace, users, at)
        return at

    async def of(self, config: cri.ContainerConfig) -> Path | None:
        """Return the file of a container's user namespace; None: it has the VM's. Raises as `get`."""
        users = wanted_by(config)
        return None if users is None else await self.get(users)


def wanted_by(config: cri.ContainerConfig) -> UserNamespace | None:
    """Return the user namespace of a container. :raise InvalidArgument: it is malformed."""
    return user_namespace(config.linux.security_context.namespace_options, FIELD)


def check_user(user: ProcessUser, users: UserNamespace) -> None:
    """Check that a process can have these ids. :raise InvalidArgument: the namespace has no such id."""
    for ids, kind, values in (
        (users.uids, "user", (user.uid,)),
        (users.gids, "group", (user.gid, *user.groups)),
    ):
        for value in values:
            if value >= ids.length:
                raise InvalidArgument(
                    f"security_context: {kind} {value} is not in the pod's user namespace, which has the ids "
                    f"0 to {ids.length - 1}; choose one of these, or leave hostUsers: false out"
                )


def check_capabilities(capabilities: cri.Capability) -> None:
    """Check that `capabilities` has no capability that requires ownership of the network namespace.

    :raise InvalidArgument: it has one; names it."""
    for field in ("add_capabilities", "add_ambient_capabilities"):
        for name in getattr(capabilities, field):
            if security.capability(name) in _OF_NETWORK:
                raise InvalidArgument(
                    f"security_context.capabilities.{field}: {name[:80]} has no effect in a user "
                    "namespace, as the network is the VM's; leave it or hostUsers: false out"
                )


def check_passable(root: Path) -> None:
    """Check that users of a user namespace reach a container's root. Blocks.

    :raise FailedPrecondition: they don't; names the directory."""
    for directory in root.absolute().parents:
        if not os.stat(directory).st_mode & 0o001:
            raise FailedPrecondition(
                f"{directory} in this VM lets no user of a user namespace through; its mode has to be 0711"
            )
