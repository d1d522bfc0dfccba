# SPDX-License-Identifier: Apache-2.0
"""The PID namespace that the containers of a pod share with each other, but not with their VM."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.processes import runs
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from vmserver.containers.oci.addresses import PERSONALITY
from vmserver.containers.oci.cgroup import Cgroup
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.limits import Spec
from vmserver.containers.oci.runtime import Crun
from vmserver.containers.oci.seccomp import container_seccomp
from vmserver.containers.oci.strays import kill_strays
from vmserver.containers.pod_init import LINKS, MEMORY_BYTES, PROCESSES, VISIBLE, init_command

_PREFIX = "pod-init-"  # of its names for crun, beside the containers' ids

_log = Logger()


class PodProcesses:
    """Runs the init of the pod's PID namespace: the first process of all containers that share one.

    crun runs it without a conmon. It reaps processes that have lost their parents, outlives the containers
    and the agent, and ends once the pod has no container left, not even one that has ended. When it ends in
    another way, the kernel kills all that is in its namespace, and the next container gets a new one.

    Containers can reach it like any process of their pod. So it has none of the VM's privileges and files.

    :param directory: for its bundle. Users of a user namespace have to reach it.
    :param cgroups: the path of the cgroup that its own is made in.
    """

    def __init__(self, reactor: IReactor, crun: Crun, directory: Path, cgroups: str) -> None:
        self._reactor = reactor
        self._crun = crun
        self._directory = directory
        self._cgroups = cgroups
        self._lock = DeferredLock()

    async def get(self, users: Path | None, kernel: Kernel) -> int:
        """Return the init's pid. It is started unless it runs.

        :param users: the file of the pod's user namespace, if it has one.
        :raise FailedPrecondition: it can't be started."""
        async with self._lock:
            for id in self.ids():
                status = self._crun.status(id)
                if status is not None and runs(status.pid, status.ticks):
                    return status.pid
                await self._delete(id)
            return await self._start(users, kernel)

    async def release(self, unused: Callable[[], bool]) -> None:
        """End the init, unless it is in use. A failure is logged, and the next call tries again.

        :param unused: says whether no container needs it, asked while no other call can start one."""
        async with self._lock:
            for id in self.ids() if unused() else []:
                try:
                    await self._delete(id)
                except InfranetesError as error:
                    _log.warn("the init of the pod's processes does not end: {error}", error=error)

    def ids(self) -> list[str]:
        """Return its name for crun, and those of others that have been left behind."""
        return os.listdir(self._directory) if self._directory.exists() else []

    async def _start(self, users: Path | None, kernel: Kernel) -> int:
        id = _PREFIX + secrets.token_hex(8)
        bundle = self._directory / id
        spec = init_spec(f"{self._cgroups}/{id}", users, kernel)
        try:
            text = json.dumps(self._crun.filters.added(spec))
            await run_in_thread(self._reactor, _thd_make, bundle, text)
            said = await self._crun.run(id, bundle)
            self._crun.filters.keep(spec, id)
            status = self._crun.status(id)
            if status is None or not runs(status.pid, status.ticks):
                raise FailedPrecondition(f"the init of the pod's processes does not start: {said}")
        except BaseException:
            await self._delete(id)
            raise
        return status.pid

    async def _delete(self, id: str) -> None:
        if self._crun.status(id) is None:  # an earlier agent's crun may be about to make it
            await run_in_thread(self._reactor, kill_strays, id)
            await run_in_thread(self._reactor, Cgroup(f"{self._cgroups}/{id}").kill)
        await self._crun.delete(id)
        await run_in_thread(self._reactor, shutil.rmtree, self._directory / id, True)


def init_spec(cgroup: str, users: Path | None, kernel: Kernel) -> Spec:
    """Return the config.json of an init in a PID namespace of its own.

    :raise FailedPrecondition: no program that can be one is installed."""
    confined = cri.LinuxContainerSecurityContext(
        seccomp=cri.SecurityProfile(profile_type=cri.SecurityProfile.RuntimeDefault)
    )
    namespaces: list[Spec] = [{"type": "mount"}, {"type": "pid"}]
    if users is not None:
        namespaces.append({"type": "user", "path": str(users)})
    linux: Spec = {
        "namespaces": namespaces,
        "cgroupsPath": cgroup,
        "resources": {
            "devices": [{"allow": False, "access": "rwm"}],
            "memory": {"limit": MEMORY_BYTES},
            "pids": {"limit": PROCESSES},
        },
        "personality": PERSONALITY,
        "seccomp": container_seccomp(confined, (), kernel),
    }
    dev = {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "mode=755", "size=64k"],
    }
    visible = {"type": "bind", "options": ["rbind", "rprivate", "ro", "nosuid", "nodev"]}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": init_command(),
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [dev, {"destination": VISIBLE, "source": VISIBLE, **visible}],
        "linux": linux,
    }


def _thd_make(bundle: Path, spec: str) -> None:
    root = bundle / "rootfs"
    for directory in (bundle.parent, bundle, root, root / "dev", root / "usr"):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    (bundle / "config.json").write_text(spec)
