# SPDX-License-Identifier: Apache-2.0
"""The init of a pod's processes has nothing of its VM's, and is there as long as somebody needs it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.processes import start_ticks
from infranetes_common.reactors import installed
from tests.harness.needs import needs_programs
from tests.support.threads import in_this_thread
from vmserver.containers.oci import pod_processes as module
from vmserver.containers.oci import runtime
from vmserver.containers.oci.cgroup import Cgroup
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.pod_processes import PodProcesses, init_spec
from vmserver.containers.oci.seccomp_filters import SeccompFilters


@needs_programs("catatonit")
class SpecTests(SynchronousTestCase):
    def test_it_can_change_nothing_and_use_little(self) -> None:
        spec: Any = init_spec("/infranetes/init", None, Kernel())
        process, linux = spec["process"], spec["linux"]
        self.assertEqual((process["capabilities"], process["noNewPrivileges"]), ({}, True))
        self.assertTrue(spec["root"]["readonly"])
        usr = next(each for each in spec["mounts"] if each["destination"] == "/usr")
        self.assertLessEqual({"ro", "nosuid", "nodev"}, set(usr["options"]))
        self.assertEqual([each["destination"] for each in spec["mounts"]], ["/dev", "/usr"])
        self.assertEqual(linux["namespaces"], [{"type": "mount"}, {"type": "pid"}])
        self.assertEqual(linux["cgroupsPath"], "/infranetes/init")
        self.assertEqual(linux["resources"]["devices"], [{"allow": False, "access": "rwm"}])
        self.assertEqual(linux["resources"]["memory"], {"limit": 32 << 20})
        self.assertEqual(linux["resources"]["pids"], {"limit": 8})
        self.assertTrue(linux["seccomp"]["syscalls"])

    def test_it_is_in_the_user_namespace_of_its_pod(self) -> None:
        spec: Any = init_spec("/infranetes/init", Path("/users"), Kernel())
        self.assertIn({"type": "user", "path": "/users"}, spec["linux"]["namespaces"])


@attrs.frozen
class Status:
    pid: int
    ticks: int


class Crun:
    """Stands for crun, and runs nothing.

    :ivar failing: why a start fails. :ivar stuck: none can be deleted. :ivar slow: what a start waits for.
    """

    def __init__(self) -> None:
        self.known: dict[str, Status] = {}
        self.started: list[Path] = []
        self.deleted: list[str] = []
        self.failing = ""
        self.stuck = False
        self.slow: Deferred[None] | None = None
        self.filters = SeccompFilters(Path("/absent"))

    def status(self, id: str) -> Status | None:
        return self.known.get(id)

    async def run(self, id: str, bundle: Path) -> str:
        self.started.append(bundle)
        if self.slow is not None:
            await self.slow
        if not self.failing:
            self.known[id] = Status(os.getpid(), start_ticks(os.getpid()))
        return self.failing

    async def delete(self, id: str) -> None:
        if self.stuck:
            raise Unavailable("it does not end")
        self.deleted.append(id)
        self.known.pop(id, None)


@needs_programs("catatonit")
class PodProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        top = Path(tempfile.mkdtemp(prefix="pod-processes-"))
        self.addCleanup(shutil.rmtree, top)
        self.directory = top / "state" / "init"
        self.patch(module, "run_in_thread", in_this_thread)
        self.strays: list[str] = []
        self.patch(module, "kill_strays", self.strays.append)
        self.patch(Cgroup, "kill", lambda group: self.strays.append("its cgroup"))
        self.crun = Crun()
        self.processes = PodProcesses(installed(), cast(runtime.Crun, self.crun), self.directory, "/none")

    def got(self) -> Deferred[int]:
        return start(self.processes.get(None, Kernel()))

    def release(self, unused: bool = True) -> None:
        self.successResultOf(start(self.processes.release(lambda: unused)))

    def test_there_is_one_however_many_ask_for_it(self) -> None:
        self.crun.slow = Deferred()
        asking = [self.got() for _ in range(3)]
        self.crun.slow.callback(None)
        self.assertEqual([self.successResultOf(each) for each in asking], [os.getpid()] * 3)
        (bundle,) = self.crun.started
        self.assertEqual(os.listdir(self.directory), [bundle.name])
        spec = json.loads((bundle / "config.json").read_text())
        self.assertEqual(spec["linux"]["cgroupsPath"], f"/none/{bundle.name}")
        self.assertEqual(sorted(os.listdir(bundle / "rootfs")), ["dev", "lib", "lib64", "usr"])
        self.assertEqual(self.strays, [])

    def test_its_directories_are_passable_and_nobody_elses_to_write_to(self) -> None:
        self.addCleanup(os.umask, os.umask(0))
        self.successResultOf(self.got())
        (bundle,) = self.crun.started
        for directory in (self.directory, bundle, bundle / "rootfs", bundle / "rootfs" / "dev"):
            self.assertEqual(directory.stat().st_mode & 0o777, 0o755, directory)

    def test_one_that_has_ended_is_replaced(self) -> None:
        self.successResultOf(self.got())
        (old,) = self.crun.started
        self.crun.known[old.name] = Status(os.getpid(), 1)  # another process has its number
        self.successResultOf(self.got())
        self.assertEqual((self.crun.deleted, self.strays), ([old.name], []))
        self.assertEqual(os.listdir(self.directory), [self.crun.started[1].name])

    def test_what_an_agent_that_was_killed_has_begun_is_ended_first(self) -> None:
        (self.directory / "pod-init-1").mkdir(parents=True)
        self.successResultOf(self.got())
        self.assertEqual(self.strays, ["pod-init-1", "its cgroup"], "who could still fill it goes first")
        self.assertFalse((self.directory / "pod-init-1").exists())

    def test_one_that_does_not_start_says_why_and_leaves_nothing(self) -> None:
        self.crun.failing = "no memory"
        failure = self.failureResultOf(self.got(), FailedPrecondition)
        self.assertIn("does not start: no memory", str(failure.value))
        self.assertEqual(os.listdir(self.directory), [])
        self.crun.failing = ""
        self.assertEqual(self.successResultOf(self.got()), os.getpid())

    def test_it_ends_once_nobody_needs_it(self) -> None:
        self.release()
        self.successResultOf(self.got())
        self.release(unused=False)
        self.assertEqual(self.crun.deleted, [])
        for _ in range(2):
            self.release()
        self.assertEqual((len(self.crun.deleted), os.listdir(self.directory)), (1, []))

    def test_one_that_does_not_end_is_told_and_tried_again(self) -> None:
        self.successResultOf(self.got())
        self.crun.stuck = True
        with capturedLogs() as events:
            self.release()
        self.assertEqual(len(events), 1)
        self.crun.stuck = False
        self.release()
        self.assertEqual(os.listdir(self.directory), [])
