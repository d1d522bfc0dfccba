# SPDX-License-Identifier: Apache-2.0
"""What a clone gives up of the pod that was kept, besides its containers."""

from __future__ import annotations

from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from vmserver.firewall.firewall import Firewall
from vmserver.keeping import addresses, connections
from vmserver.volumes.nfs import NfsMounts

_log = Logger()


class PodDeparture:
    """The `Departure` of a machine that is a pod's alone. :param nfs: None: it mounts none."""

    def __init__(self, reactor: IReactor, firewall: Firewall, nfs: NfsMounts | None) -> None:
        self._reactor = reactor
        self._firewall = firewall
        self._nfs = nfs

    async def check(self) -> None:
        mounted = [] if self._nfs is None else await self._nfs.mounted()
        if mounted:
            raise FailedPrecondition(
                f"the pod has {len(mounted)} NFS volumes, whose connections and locks clones would share, so "
                "it can't be kept"
            )
        await run_in_thread(self._reactor, connections.thd_check)

    async def leave(self) -> None:
        began = self._reactor.seconds()
        ended = await run_in_thread(self._reactor, connections.thd_end_all)
        await run_in_thread(self._reactor, addresses.thd_leave)
        await self._firewall.reset()
        _log.info(
            "this is a clone: {count} connections of the pod that was kept are ended, after {seconds:.2f} s",
            count=ended,
            seconds=self._reactor.seconds() - began,
        )
