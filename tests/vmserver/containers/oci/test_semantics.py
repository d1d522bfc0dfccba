# SPDX-License-Identifier: Apache-2.0
"""Containers run by conmon and crun have what their configuration says."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from tests.contract.container_semantics import (
    ImageVolumeContract,
    MountContract,
    NamespaceContract,
    PrivilegeContract,
    ProcessContract,
    SemanticsCase,
    UserContract,
)
from tests.harness.needs import needs_crun
from tests.support.oci import busybox_layer, image, layer
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers import pod_init
from vmserver.containers.oci import addresses
from vmserver.containers.oci.cgroup import is_v2


@needs_crun
class UserTests(OciCase, UserContract, TestCase):
    """User and groups of the first process."""


@needs_crun
class OutputTests(OciCase, SemanticsCase, TestCase):
    """A container's /dev/stdout and /dev/stderr."""

    async def test_who_has_dropped_root_can_open_the_output_but_not_read_it(self) -> None:
        script = (
            "id -u; echo out >/dev/stdout; echo err >/dev/stderr; (: </dev/stdout) 2>/dev/null || echo closed"
        )
        expected = ["1000", "out", "err", "closed", ""]
        self.assertEqual((await self.said(f"su app -s /bin/sh -c '{script}'")).split("\n"), expected)
        id = await self.run_container("sleep", "600")
        as_app = ["sh", "-c", f"exec 2>&1; su app -s /bin/sh -c '{script}'"]
        result = await self.provider.exec_sync(id, as_app, 30.0, 9999)
        self.assertEqual(result.stdout.decode().split("\n"), expected)

    async def test_a_user_from_the_beginning_can_open_it_too(self) -> None:
        user = self.secured(run_as_user=cri.Int64Value(value=1000))
        self.assertEqual(await self.said("echo out >/dev/stdout; echo err >/dev/stderr", user), "out\nerr\n")


@needs_crun
class PrivilegeTests(OciCase, PrivilegeContract, TestCase):
    """Privileges of its processes."""


@needs_crun
class NamespaceTests(OciCase, NamespaceContract, TestCase):
    """Which namespaces it shares."""

    async def test_tini_does_where_catatonit_is_not_installed(self) -> None:
        self.patch(pod_init, "_COMMANDS", pod_init._COMMANDS[1:])
        said = await self.said("tr '\\0' ' ' </proc/1/cmdline; kill -0 1 && echo; ls /proc/1/root")
        self.assertEqual(said.splitlines()[0], "/usr/bin/tini -- /usr/bin/sleep infinity ")
        self.assertNotIn("etc", said)
        self.patch(pod_init, "_COMMANDS", ())
        await self.create("true")  # what runs goes on
        for container in await self.provider.containers():
            await self.provider.remove(container.id)
        self.assertIn(
            "install the package catatonit", await self.refused(FailedPrecondition, self.create("true"))
        )

    async def test_the_pods_first_process_is_gone_with_its_last_container(self) -> None:
        init = self.config.directory / "init"
        ids = [await self.run_container("true") for _ in range(2)]
        for left, id in ((1, ids[0]), (0, ids[1])):
            await self.ended(id)
            await self.restarted()
            await self.provider.remove(id)
            self.assertEqual(len(os.listdir(init)), left)


@needs_crun
class ProcessTests(OciCase, ProcessContract, TestCase):
    """Its command, environment, devices and limits."""

    frees_processor = is_v2()

    async def test_its_addresses_are_random_where_those_of_crun_are_not(self) -> None:
        self.patch(addresses, "emulated", lambda: True)
        id = await self.run_container("sh", "-c", "cat /proc/self/personality; sleep 1000")
        command = ["cat", "/proc/self/personality"]
        executed = await self.provider.exec_sync(id, command, 30.0, 1000)
        self.assertEqual(executed.stdout, b"00000000\n")
        await self.until(lambda: self.log_of(id).endswith("00000000\n"), "its first process says so too")

    async def test_one_that_is_stopped_is_not_killed_for_memory_that_a_process_of_it_lacked_before(
        self,
    ) -> None:
        limits = cri.LinuxContainerConfig(
            resources=cri.LinuxContainerResources(memory_limit_in_bytes=16 << 20)
        )
        script = "dd if=/dev/zero of=/dev/null bs=64M; echo $?; exec sleep 600"
        for how in ("stop", "kill"):
            id = await self.run_container("sh", "-c", script, linux=limits)
            await self.until(partial(self.logged, id, " 137\n"), "its first command was killed")
            if how == "stop":
                await self.provider.stop_container(id, 0)
            else:  # by somebody else, who could be the kernel
                os.kill((await self.state(id)).pid, signal.SIGKILL)
            state = await self.ended(id)
            expected = (137, "Error" if how == "stop" else "OOMKilled")
            self.assertEqual((state.exit_code, state.reason), expected)

    def logged(self, id: str, text: str) -> bool:
        return text in self.log_of(id)

    def log_of(self, id: str) -> str:
        return (self.config.directory / "containers" / id / "log").read_text()


@needs_crun
class ImageVolumeTests(OciCase, ImageVolumeContract, TestCase):
    """Images mounted as volumes."""

    volumes = "oci/volumes"

    async def test_one_that_is_named_by_no_id_is_refused(self) -> None:
        for name in ("", "busybox", "sha256:../up", "sha256:" + "g" * 64):
            words = await self.refused(
                InvalidArgument, self.create("true", mounts=[self.mount(image_id=name)])
            )
            self.assertIn("/volume", words)


@needs_crun
class MountTests(OciCase, MountContract, TestCase):
    """Mount propagation between the containers of a pod, and what mounts do not allow."""


@needs_crun
class RootTests(OciCase, SemanticsCase, TestCase):
    """What is in a container's root besides its image."""

    async def test_names_are_the_pods_whatever_the_image_has(self) -> None:
        for name in ("hosts", "hostname", "resolv.conf"):
            (self.etc / name).write_text(f"the pod's {name}\n")
        odd: tuple[dict[str, bytes | tuple[str, str]], ...] = (
            {},
            {"etc/hostname": ("dir", "755"), "etc/hostname/file": b"", "etc/hosts": ("link", "hostname"),
             "etc/resolv.conf": ("link", "/dev/null")},
            {"etc/hostname": ("link", "/proc/sys/kernel/hostname"), "etc/hosts": ("link", "hosts"),
             "etc/resolv.conf": ("link", "/sys/absent")},
        )  # fmt: skip
        for files in odd:
            built = image([busybox_layer(), layer(files)] if files else [busybox_layer()])
            await self.load(built)
            self.image_id = built.id
            for read_only in (False, True):
                context = self.secured(readonly_rootfs=read_only)
                said = await self.said("cd /etc; cat hostname hosts resolv.conf", context)
                names = "the pod's hostname\nthe pod's hosts\nthe pod's resolv.conf\n"
                self.assertEqual(said, names, (files, read_only))

    async def test_a_tree_of_any_depth_is_deleted_with_it(self) -> None:
        self.assertEqual(await self.said("mkdir -p $(yes d/ | head -1500 | tr -d '\\n') && echo ok"), "ok\n")
        for state in await self.provider.containers():
            await self.provider.remove(state.id)
        self.assertEqual(os.listdir(self.config.directory / "containers"), [])

    async def test_memory_that_it_shares_runs_no_program(self) -> None:
        said = await self.said("grep ' /dev/shm ' /proc/self/mountinfo")
        self.assertRegex(said, " /dev/shm rw,nosuid,nodev,noexec")


@needs_crun
class WantedVolumeTests(OciCase, SemanticsCase, TestCase):
    """Directories that an image wants as volumes."""

    async def image_with(
        self, *paths: str, files: Mapping[str, bytes | tuple[str, str]] = MappingProxyType({})
    ) -> None:
        files = files or {
            "has": ("dir", "711"), "has/file": b"of the image\n", "to": ("link", "linked"), "file": b"",
        }  # fmt: skip
        built = image([busybox_layer(), layer(files)], {"Volumes": {path: {} for path in paths}})
        await self.load(built)
        self.image_id = built.id

    async def test_those_in_no_layer_are_made_and_others_stay_as_they_are(self) -> None:
        await self.image_with("/data/deep", "/has", "/to/new", "/file", "/file/below")
        said = await self.said(
            "stat -c '%u:%g %a %n' /data /data/deep /has /linked/new; cat /has/file; echo a >/data/deep/x; "
            "grep -c -e ' /data' -e ' /has ' /proc/self/mountinfo"
        )
        self.assertEqual(
            said, "0:0 755 /data\n0:0 755 /data/deep\n0:0 711 /has\n0:0 755 /linked/new\nof the image\n0\n"
        )

    async def test_they_can_be_written_to_though_the_root_is_read_only(self) -> None:
        await self.image_with("/data", "/has")
        script = "cat /has/file; echo a >/data/x && echo b >/has/x && cat /data/x /has/x; touch /x"
        said = await self.said(script, self.secured(readonly_rootfs=True))
        self.assertEqual(said, "of the image\na\nb\ntouch: /x: Read-only file system\n")

    async def test_those_in_the_kernels_file_systems_are_left_out(self) -> None:
        (self.etc / "hosts").write_text("the pod's hosts\n")
        kernels = ("/proc", "/proc/x", "/to_proc", "/sys/fs/cgroup", "/sys/x", "/dev", "/dev/x", "/dev/shm/x")
        files: dict[str, bytes | tuple[str, str]] = {"to_proc": ("link", "/proc/x")}
        for path in (*kernels, "/etc/hosts"):
            await self.image_with(path, files=files)
            for read_only in (False, True):
                script = (
                    "cat /etc/hosts; test -e /proc/self/stat -a -d /sys/kernel -a -c /dev/null && echo ok"
                )
                said = await self.said(script, self.secured(readonly_rootfs=read_only))
                self.assertEqual(said, "the pod's hosts\nok\n", (path, read_only))

    async def test_none_leads_out_of_the_root(self) -> None:
        files: dict[str, bytes | tuple[str, str]] = {"out": ("link", str(self.base))}
        built = image([busybox_layer(), layer(files)], {"Volumes": {"/out/made": {}, "/../../made": {}}})
        await self.load(built)
        self.image_id = built.id
        self.assertEqual(await self.said("ls -d /made /out/made"), "/made\n/out/made\n")
        self.assertFalse((self.base / "made").exists())
