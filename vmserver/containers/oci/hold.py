# SPDX-License-Identifier: Apache-2.0
"""Holding containers still by the kernel's freezer: none of their processes runs until they are let go.

A frozen process keeps all that it has, and is seen as sleeping. With cgroups of version 2 it can be killed as
any other; with version 1 it dies once it is let go. Sources: Linux Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/freezer-subsystem.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import backoff, run_in_thread, shielded, sleep
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor
from vmserver.containers.exec_limits import check_executable
from vmserver.containers.hooks import OUTPUT_BYTES, Hook
from vmserver.containers.oci.bundle import Bundles
from vmserver.containers.oci.cgroup import Cgroup
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.execs import Execs
from vmserver.containers.oci.runtime import Crun
from vmserver.containers.oci.spec import process_spec

FREEZE_SECONDS = 10.0  # for all processes to stop: those that wait for a disk stop once they have it

HELD = "the pod's containers are held still while its VM is kept: try again in a moment"


class Freezer:
    """Freezes containers, lets them go, and tells them before and after."""

    def __init__(self, reactor: IReactor, crun: Crun, bundles: Bundles, execs: Execs) -> None:
        self._reactor = reactor
        self._crun = crun
        self._bundles = bundles
        self._execs = execs
        self._lock = DeferredLock()

    def group(self, engine_id: str) -> Cgroup | None:
        """Return the cgroup of what crun knows by this id; None if that has none, or has ended.

        :raise Unavailable: crun's record can't be read."""
        status = self._crun.status(engine_id)
        return None if status is None else status.cgroup

    async def freeze(self, engine_ids: Iterable[str], seconds: float = FREEZE_SECONDS) -> None:
        """Stop all processes of these containers. What has been stopped stays so if it fails.

        :raise FailedPrecondition: one has no cgroup of its own.
        :raise Unavailable: they don't stop in time, or the kernel refuses."""
        groups = {}
        for id in engine_ids:
            group = self.group(id)
            if group is not None:
                groups[id] = group
            elif self._crun.status(id) is not None:
                raise FailedPrecondition(
                    f"container {id} has no cgroup of its own, so it can't be held still"
                )
        await shielded(self._set(groups, frozen=True))
        await _until_frozen(self._reactor, groups, seconds)

    async def thaw(self, engine_ids: Iterable[str]) -> None:
        """Let these containers go on. Does nothing to those that aren't frozen.

        :raise Unavailable: the kernel refuses; the others go on."""
        groups = {id: group for id in engine_ids if (group := self.group(id)) is not None}
        await shielded(self._set(groups, frozen=False))

    async def _set(self, groups: Mapping[str, Cgroup], *, frozen: bool) -> None:
        async with self._lock:  # who was cancelled thaws what a thread may still be freezing
            await run_in_thread(self._reactor, _thd_set, groups, frozen)

    async def tell(self, container: OciContainer, hook: Hook) -> None:
        """Run a hook in a container that goes on.

        :raise FailedPrecondition: it does not run, or the command ends with another code than 0.
        :raise DeadlineExceeded: the command takes too long, and was killed."""
        if not hook.command:
            status = self._crun.status(container.engine_id)
            if status is None or not status.signal(hook.signal):
                raise FailedPrecondition(f"container {container.id} is not running")
            await sleep(self._reactor, hook.seconds)
            return
        spec = await self._bundles.read(container)
        check_executable(hook.command, spec["process"]["env"])
        process = process_spec(spec, hook.command, False)
        score = container.record.state.resources.oom_score_adj
        result = await self._execs.exec_sync(container.engine_id, process, score, hook.seconds, OUTPUT_BYTES)
        if result.exit_code:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()
            raise FailedPrecondition(
                f"the hook {' '.join(hook.command)[:200]!r} of container {container.id} ended with "
                f"{result.exit_code}: {said[:500] or 'it said nothing'}"
            )


def _thd_set(groups: Mapping[str, Cgroup], frozen: bool) -> None:
    failed = []
    for id, group in groups.items():
        try:
            group.freeze() if frozen else group.thaw()
        except OSError as error:
            failed.append(f"container {id}: {error.strerror}")
    if failed:
        what = "held still" if frozen else "let go"
        raise Unavailable(f"the kernel refuses that containers are {what}: {'; '.join(failed)[:1000]}")


async def _until_frozen(clock: IReactorTime, groups: Mapping[str, Cgroup], seconds: float) -> None:
    waited = 0.0
    for pause in backoff(0.002, 0.05):
        moving = [id for id, group in groups.items() if not group.is_frozen]
        if not moving:
            return
        if waited >= seconds:
            raise Unavailable(
                f"the processes of container {moving[0]} do not stop within {seconds:g} s: does one wait for "
                "a file system that doesn't answer?"
            )
        await sleep(clock, pause)
        waited += pause
