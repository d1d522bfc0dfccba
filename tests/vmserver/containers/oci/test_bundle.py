# SPDX-License-Identifier: Apache-2.0
"""A bundle is made once, and made ready again before each start: see `Bundles`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.harness.needs import needs_root
from tests.support.threads import in_this_thread
from vmserver.containers.oci import bundle as module
from vmserver.containers.oci import index as index_module
from vmserver.containers.oci import state
from vmserver.containers.oci.bundle import Bundles
from vmserver.containers.oci.conmon import CannotRun
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.index import ContainerIndex
from vmserver.containers.oci.kernel import Kernel

IMAGE = {"config": {"Cmd": ["sh"], "StopSignal": "SIGUSR1", "Volumes": {"/data": {}}}}


@attrs.frozen
class Image:
    configuration: bytes


class Machine:
    """Stands for the images, the file systems, the user namespaces and the pod's init.

    :ivar made: what was made ready, in its order. :ivar init: the pid of the pod's init.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self.init = 70

    async def get(self, *which: object) -> Any:
        """Return an image, or the pod's init."""
        if len(which) == 1:
            return Image(json.dumps(IMAGE).encode())
        self.made.append("init")
        return self.init

    async def make(self, container: OciContainer) -> None:
        self.made.append("root")
        container.root.mkdir(parents=True, exist_ok=True)

    async def volumes(self, mounts: object) -> dict[int, str]:
        self.made.append("volumes")
        return {}

    async def of(self, config: object) -> None:
        return None

    def added(self, spec: Any) -> Any:
        return {**spec, "annotations": {"with": "a filter"}}

    async def load(self, reference: str) -> None:
        self.made.append(f"profile {reference.partition(chr(10))[0]}")


@needs_root
class BundleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="bundle-"))
        self.addCleanup(shutil.rmtree, self.top)
        for each in (module, index_module):
            self.patch(each, "run_in_thread", in_this_thread)
        self.etc = self.top / "etc"
        self.etc.mkdir()
        self.machine: Any = Machine()
        self.index = ContainerIndex(installed(), self.top / "containers")
        everything: Any = self.machine
        self.bundles = Bundles(
            installed(), self.index, everything, everything, everything, everything, everything, self.etc
        )  # fmt: skip
        self.bundles._profiles = everything
        self.kernel(Kernel())

    def kernel(self, kernel: Kernel) -> None:
        """Let this be the VM's kernel."""
        self.bundles._kernel = kernel

    def made(self, id: str = "c1", sandbox: Any = None, limits: Any = None, **context: Any) -> OciContainer:
        """Return a container that has been made, with these fields of its security context."""
        security = cri.LinuxContainerSecurityContext(**context)
        config = cri.ContainerConfig(
            linux=cri.LinuxContainerConfig(security_context=security, resources=limits)
        )
        container = self.bundles.new(id, "i1", config)
        self.successResultOf(start(self.bundles.make(container, sandbox or cri.PodSandboxConfig())))
        self.successResultOf(start(self.index.add(container)))
        return container

    def prepared(self, container: OciContainer) -> Any:
        """Make a container ready for its start. Return its specification."""
        self.successResultOf(start(self.bundles.prepare(container)))
        return self.spec(container)

    def spec(self, container: OciContainer) -> Any:
        return json.loads((container.bundle / "config.json").read_text())

    def pid_namespaces(self, spec: Any) -> list[str]:
        return [each.get("path") for each in spec["linux"]["namespaces"] if each["type"] == "pid"]

    def running(self, id: str, pid: int) -> OciContainer:
        container = self.made(id)
        state.running(container.record, pid)
        return container

    def test_what_the_configuration_and_the_image_say_is_recorded(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=2**20)
        user: Any = {"run_as_user": cri.Int64Value(value=5), "supplemental_groups": [6, 7, 6]}
        made = self.made(limits=limits, **user)
        self.assertEqual(made.record.state.resources, limits)
        self.assertEqual(made.record.stop_signal, 10)
        self.assertEqual(
            made.record.state.user.linux,
            cri.LinuxContainerUser(uid=5, gid=0, supplemental_groups=[0, 6, 7]),
        )
        self.assertEqual((made.record.state.image_id, made.record.state.state), ("i1", cri.CONTAINER_CREATED))
        self.assertGreater(made.record.state.created_at, 0)
        spec = self.spec(made)
        self.assertEqual(spec["linux"]["cgroupsPath"], "/infranetes/c1")
        self.assertEqual(spec["linux"]["resources"]["memory"]["limit"], 2**20)

    def test_volumes_of_the_image_are_mounted_only_where_the_root_is_read_only(self) -> None:
        for readonly in (False, True):
            made = self.made(readonly_rootfs=readonly)
            self.assertTrue((made.root / "data").is_dir())
            mounts = {each["destination"]: each["source"] for each in self.spec(made)["mounts"]}
            expected = str(made.root / "data") if readonly else None
            self.assertEqual(mounts.get("/data"), expected)

    def test_the_pods_names_are_made_unless_they_are_not_there_or_others_are_mounted(self) -> None:
        for name in ("hosts", "resolv.conf"):
            (self.etc / name).touch()
        kubelets = self.top / "kubelets"
        kubelets.touch()
        mounts = [
            cri.Mount(container_path="/etc/hosts", host_path="/no/such"),
            cri.Mount(container_path="/etc/hostname", host_path=str(kubelets)),
        ]
        root = self.top / "root"
        root.mkdir()
        module._thd_make_names(root, self.bundles._sandbox_files, cri.ContainerConfig(mounts=mounts))
        self.assertEqual(sorted(os.listdir(root / "etc")), ["hostname", "hosts", "resolv.conf"])
        module._thd_make_names(self.top / "none", {}, cri.ContainerConfig())
        self.assertFalse((self.top / "none").exists())

    def test_a_start_makes_all_ready_that_a_boot_has_taken(self) -> None:
        self.kernel(Kernel(apparmor=True))
        made = self.made(namespace_options=cri.NamespaceOption(pid=cri.CONTAINER))
        self.assertEqual(self.machine.made, ["root", "volumes", "profile infranetes-default"])
        before = self.spec(made)
        self.machine.made.clear()
        self.assertEqual(self.prepared(made), before)
        self.assertEqual(self.machine.made, ["root", "volumes", "profile infranetes-default"])

    def test_it_joins_the_pods_processes_as_they_are_when_it_starts(self) -> None:
        made = self.made()
        self.assertEqual(self.pid_namespaces(self.spec(made)), ["/proc/70/ns/pid"])
        self.machine.init = 71
        self.assertEqual(self.pid_namespaces(self.prepared(made)), ["/proc/71/ns/pid"])

    def test_it_joins_the_processes_of_its_target_as_they_are_when_it_starts(self) -> None:
        target = self.running("c0", 40)
        self.machine.made.clear()
        joining = cri.NamespaceOption(pid=cri.TARGET, target_id="c0")
        made = self.made("c1", namespace_options=joining)
        self.assertEqual(self.pid_namespaces(self.spec(made)), ["/proc/40/ns/pid"])
        target.record.state.pid = 41
        self.assertEqual(self.pid_namespaces(self.prepared(made)), ["/proc/41/ns/pid"])
        self.assertNotIn("init", self.machine.made)
        before = self.spec(made)
        state.lost(target.record, 1)
        failure = self.failureResultOf(start(self.bundles.prepare(made)), FailedPrecondition)
        self.assertIn("container c0", str(failure.value))
        self.index.remove(target)
        self.failureResultOf(start(self.bundles.prepare(made)), FailedPrecondition)
        self.assertEqual(self.spec(made), before)

    def test_a_target_that_does_not_run_is_none(self) -> None:
        self.made("c0").record.state.pid = 40
        joining = cri.LinuxContainerSecurityContext(
            namespace_options=cri.NamespaceOption(pid=cri.TARGET, target_id="c0")
        )
        config = cri.ContainerConfig(linux=cri.LinuxContainerConfig(security_context=joining))
        made = self.bundles.new("c1", "i1", config)
        failure = self.failureResultOf(
            start(self.bundles.make(made, cri.PodSandboxConfig())), FailedPrecondition
        )
        self.assertIn("container c0 does not run", str(failure.value))

    def test_what_the_kernel_would_not_execute_can_not_run(self) -> None:
        made = self.made()
        spec = self.spec(made)
        spec["process"]["args"] = ["x" * 200_000]
        (made.bundle / "config.json").write_text(json.dumps(spec))
        failure = self.failureResultOf(start(self.bundles.prepare(made)), CannotRun)
        self.assertEqual(failure.value.exit_code, 126)

    def test_limits_of_one_that_does_not_run_are_in_its_bundle_beside_the_others(self) -> None:
        made = self.made()
        before = self.spec(made)
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=2**20, oom_score_adj=7)
        self.successResultOf(start(self.bundles.limit(made, limits)))
        before["linux"]["resources"]["memory"] = {"limit": 2**20, "swap": 2**20}
        before["process"]["oomScoreAdj"] = 7
        self.assertEqual(self.spec(made), before)

    def test_users_that_are_not_the_pods_are_refused_and_nothing_is_made(self) -> None:
        users = cri.UserNamespace(
            mode=cri.POD,
            uids=[cri.IDMapping(host_id=65536, length=65536)],
            gids=[cri.IDMapping(host_id=65536, length=65536)],
        )
        options = cri.NamespaceOption(userns_options=users)
        context = cri.LinuxContainerSecurityContext(namespace_options=options)
        config = cri.ContainerConfig(linux=cri.LinuxContainerConfig(security_context=context))
        making = start(self.bundles.make(self.bundles.new("c1", "i1", config), cri.PodSandboxConfig()))
        self.assertIn("not those of the pod", str(self.failureResultOf(making, InvalidArgument).value))
        self.assertEqual(self.machine.made, [])

    def test_a_bundle_that_can_not_be_written_says_whether_there_is_room(self) -> None:
        made = self.made()
        for number, kind in ((errno.ENOSPC, ResourceExhausted), (errno.EIO, FailedPrecondition)):

            def fails(*_: object, number: int = number, **__: object) -> None:
                raise OSError(number, os.strerror(number))

            for name, work in (
                ("replace_file", lambda: self.bundles.prepare(made)),
                ("make_directory", lambda: self.bundles.make(made, cri.PodSandboxConfig())),
            ):
                self.patch(module, name, fails)
                self.failureResultOf(start(work()), kind)

    def test_what_is_made_for_a_user_namespace_is_its_roots(self) -> None:
        mapped = {
            "uids": [cri.IDMapping(host_id=1000, length=9)],
            "gids": [cri.IDMapping(host_id=2000, length=9)],
        }
        options = cri.NamespaceOption(userns_options=cri.UserNamespace(mode=cri.POD, **mapped))
        pods = cri.LinuxSandboxSecurityContext(namespace_options=options)
        (self.etc / "hosts").touch()
        sandbox = cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(security_context=pods))
        made = self.made(sandbox=sandbox, namespace_options=options)
        for path in ("data", "etc", "etc/hosts"):
            found = (made.root / path).stat()
            self.assertEqual((found.st_uid, found.st_gid), (1000, 2000), path)
