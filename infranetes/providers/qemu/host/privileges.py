# SPDX-License-Identifier: Apache-2.0
"""The user that a QEMU process runs as, and how it loses every other privilege."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class QemuUser(NamedTuple):
    """Ids that a QEMU process runs with."""

    uid: int
    gid: int
    groups: Sequence[int] = ()  # supplementary groups


def unprivileged(
    command: Sequence[str], user: QemuUser, *, dies_with_parent: bool, own_session: bool = True
) -> list[str]:
    """Wrap `command` so that it runs as `user` and without any capability.

    :param own_session: in a session of its own. Not where it is started as the leader of a process group,
        as by `infranetes_common.commands`: there setsid forks, ends at once, and nobody waits for the child.
    """
    drop = ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    ids = [f"--reuid={user.uid}", f"--regid={user.gid}"]
    ids.append(f"--groups={','.join(map(str, user.groups))}" if user.groups else "--clear-groups")
    death = ["--pdeathsig=KILL"] if dies_with_parent else []
    session = ["setsid"] if own_session else []
    return [*session, "setpriv", *ids, *drop, *death, *command]
