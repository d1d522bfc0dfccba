# SPDX-License-Identifier: Apache-2.0
"""Pods with a user namespace, in containers that conmon and crun really run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_crun
from tests.support.oci import busybox_layer, image, layer
from tests.support.user_namespaces import FIRST, LENGTH, ids, namespaces, of_container, of_pod
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.layers.rootfs import MAX_LAYERS
from vmserver.machine.mounts import mounts_below, unmount

FILES = image([layer({"low": b"low\n", "both": b"low\n"}), layer({"both": b"high\n"})])


def pod(options: cri.NamespaceOption) -> cri.PodSandboxConfig:
    return cri.PodSandboxConfig(linux=of_pod(options))


@needs_crun
class UserNamespaceCase(OciCase, TestCase):
    """Create containers of a pod that has a user namespace."""

    options = namespaces()

    async def setUp(self) -> None:
        await super().setUp()
        self.base.chmod(0o711)
        self.kept = self.run_dir / "oci" / "users"

    async def tearDown(self) -> None:
        for state in await self.provider.containers():
            await self.provider.remove(state.id)
        self.forget_namespaces()
        await super().tearDown()

    def forget_namespaces(self) -> None:
        """Remove the namespaces, as a boot does."""
        for file in self.kept.glob("*"):
            unmount(file)
            file.unlink()

    async def create(self, *command: str, id: str = "", **fields: Any) -> str:
        id = id or secrets.token_hex(16)
        context = fields.pop("context", {})
        options = fields.pop("options", self.options)
        sandbox = pod(fields.pop("pods", options))
        linux = of_container(options, **context)
        linux.resources.CopyFrom(fields.pop("resources", cri.LinuxContainerResources()))
        config = cri.ContainerConfig(command=command, linux=linux, **fields)
        await self.provider.create(id, self.image_id, config, sandbox)
        return id

    async def said(self, script: str, **fields: Any) -> str:
        """Run a script in a container. Return its output."""
        id = await self.run_container("sh", "-c", f"exec 2>&1; {script}", **fields)
        await self.ended(id)
        return await self.text(id)

    async def text(self, id: str) -> str:
        """Return the container's log."""
        return "".join(
            record.line.decode() + ("" if record.partial else "\n") for record in await self.lines(id)
        )

    def written(self, id: str) -> Path:
        return self.config.directory / "containers" / id / "upper"


class MappingTests(UserNamespaceCase):
    """The pod's ids are mapped as requested."""

    @slow(15, "200 file systems are made")
    async def test_an_image_of_as_many_layers_as_can_be_stacked(self) -> None:
        built = image(
            [busybox_layer(), *[layer({f"f{n}": b"", "top": b"%d" % n}) for n in range(1, MAX_LAYERS)]]
        )
        await self.load(built)
        self.image_id = built.id
        script = "cat /top; ls -d /f* | wc -l"
        self.assertEqual(await self.said(script), f"{MAX_LAYERS - 1}{MAX_LAYERS - 1}\n")
        node = await self.run_container("sh", "-c", script, options=cri.NamespaceOption())
        await self.ended(node)
        self.assertEqual(await self.text(node), f"{MAX_LAYERS - 1}{MAX_LAYERS - 1}\n")

    async def test_processes_and_files_have_the_pods_ids(self) -> None:
        script = (
            "cat /proc/self/uid_map /proc/self/gid_map;"
            "stat -c '%u:%g %n' / /bin/busybox /etc/second /dev/pts; touch /new; mkdir /d; chown 7:8 /new;"
            "cat /etc/second; exec sleep 600"
        )
        id = await self.run_container("sh", "-c", script)

        async def ready() -> bool:
            return len(await self.lines(id)) == 7

        await self.until(ready, "it has said all")
        text = await self.text(id)
        self.assertEqual(text.split()[:6], ["0", str(FIRST), str(LENGTH)] * 2)
        self.assertIn("0:0 /\n0:0 /bin/busybox\n0:0 /etc/second\n0:0 /dev/pts\nlayer\n", text)
        pid = (await self.state(id)).pid
        self.assertEqual(os.stat(f"/proc/{pid}").st_uid, FIRST)
        owners = {entry.name: entry.stat().st_uid for entry in os.scandir(self.written(id))}
        self.assertEqual({name: owners[name] for name in ("new", "d")}, {"new": FIRST + 7, "d": FIRST})

    async def test_a_user_and_what_is_executed_later(self) -> None:
        user = {"run_as_user": cri.Int64Value(value=1000), "supplemental_groups": [50]}
        id = await self.run_container("sleep", "600", context=user)
        result = await self.provider.exec_sync(
            id, ["sh", "-c", "id -u; id -G; cat /proc/self/uid_map"], 30, 999
        )
        lines = result.stdout.decode().split()
        self.assertEqual(lines[:5], ["1000", "1000", "50", "2000", "0"])
        self.assertEqual(lines[5:], [str(FIRST), str(LENGTH)])

    async def test_containers_of_the_pod_share_it(self) -> None:
        first = await self.run_container("sleep", "600")
        second = await self.run_container("sleep", "600")
        await self.restarted()
        third = await self.run_container("sleep", "600")
        found = {os.readlink(f"/proc/{(await self.state(id)).pid}/ns/user") for id in (first, second, third)}
        self.assertEqual(len(found), 1)
        self.assertNotIn(os.readlink("/proc/self/ns/user"), found)
        target = namespaces(pid=cri.TARGET, target_id=first)
        said = await self.said(
            "cat /proc/1/cmdline | tr '\\0' ' '; echo; kill -0 1 && echo reached",
            options=target,
            pods=self.options,
        )
        self.assertEqual(said, "sleep 600 \nreached\n")

    async def test_it_is_made_once_for_containers_that_are_created_side_by_side(self) -> None:
        await gatherResults([start(self.create("true")) for _ in range(3)])
        mounted = [one.point for one in mounts_below(self.base) if one.point.startswith(f"{self.kept}/")]
        self.assertEqual(len(mounted), 1)

    async def test_ids_that_it_has_not_are_refused(self) -> None:
        short = namespaces(length=100)
        for context in (
            {"run_as_user": cri.Int64Value(value=100)},
            {"run_as_user": cri.Int64Value(value=1), "run_as_group": cri.Int64Value(value=100)},
            {"supplemental_groups": [100]},
        ):
            words = await self.refused(InvalidArgument, self.create("true", options=short, context=context))
            self.assertIn("ids 0 to 99", words)
        said = await self.said("id -u; stat -c %g /dev/pts/ptmx", options=namespaces(length=4))
        self.assertEqual(said.split()[0], "0")

    async def test_another_one_than_the_pods_is_refused(self) -> None:
        for options, pods in (
            (cri.NamespaceOption(), self.options),
            (self.options, cri.NamespaceOption()),
            (namespaces(first=1), self.options),
        ):
            words = await self.refused(InvalidArgument, self.create("true", options=options, pods=pods))
            self.assertIn("userns_options", words)
        self.assertEqual(os.listdir(self.config.directory / "containers"), [])

    async def test_a_directory_that_lets_nobody_through_is_named(self) -> None:
        self.base.chmod(0o700)
        words = await self.refused(FailedPrecondition, self.create("true"))
        self.assertIn(f"{self.base} ", words)
        self.base.chmod(0o711)
        self.assertEqual(os.listdir(self.config.directory / "containers"), [])

    async def test_it_is_there_again_after_a_boot(self) -> None:
        id = await self.create("cat", "/proc/self/uid_map")
        await self.provider.stop()
        unmount(self.config.directory / "containers" / id / "bundle" / "rootfs")
        self.forget_namespaces()
        self.provider = await self.started()
        await self.provider.start_container(id)
        await self.ended(id)
        [record] = await self.lines(id)
        self.assertEqual(record.line.split(), [b"0", b"%d" % FIRST, b"%d" % LENGTH])


class AccessTests(UserNamespaceCase):
    """What the pod's containers can access in their VM."""

    async def test_processes_and_ipc_of_the_pod(self) -> None:
        shared = namespaces(pid=cri.POD, ipc=cri.POD)
        script = (
            "cat /proc/self/uid_map; echo 1 >/proc/sys/kernel/shmmni || echo kept; kill -0 1 && echo reached;"
            "ls /proc/1/root/etc || echo hidden; echo $$ >/proc/self/oom_score_adj && echo own;"
            "touch /dev/shm/un-$$ && rm /dev/shm/un-$$ && echo shared; ls -d /proc/[0-9]* | wc -l"
        )
        said = await self.said(script, options=shared)
        self.assertIn(str(FIRST), said)
        for word in ("kept", "reached", "hidden", "own", "shared"):
            self.assertIn(word, said)
        self.assertLess(int(said.split()[-1]), 7)

    async def test_what_is_of_the_vm_can_not_be_changed(self) -> None:
        script = "; ".join(
            f"{each} || echo kept"
            for each in ("echo x >/sys/kernel/mm/ksm/run", "touch /sys/x", "hostname other")
        )
        said = await self.said(script, context={"capabilities": cri.Capability(add_capabilities=["ALL"])})
        self.assertEqual(said.count("kept"), 3, said)

    async def test_the_network_is_not_its_own(self) -> None:
        for field in ("add_capabilities", "add_ambient_capabilities"):
            wanted = cri.Capability(**{field: ["net_admin"]})
            words = await self.refused(InvalidArgument, self.create("true", context={"capabilities": wanted}))
            self.assertIn(f"{field}: net_admin", words)

    async def test_paths_are_masked_and_limits_kept(self) -> None:
        context = {
            "masked_paths": ["/proc/timer_list", "/sys/firmware"],
            "readonly_paths": ["/proc/sys"],
            "no_new_privs": True,
        }
        resources = cri.LinuxContainerResources(memory_limit_in_bytes=96 << 20, oom_score_adj=500)
        said = await self.said(
            "cat /proc/timer_list | wc -c; ls /sys/firmware | wc -l; cat /proc/self/oom_score_adj;"
            "grep -c ' /proc/sys .*ro,' /proc/self/mountinfo",
            context=context,
            resources=resources,
        )
        self.assertEqual(said.split(), ["0", "0", "500", "1"])

    async def test_the_default_profile_of_seccomp_and_a_read_only_root(self) -> None:
        context = {"seccomp": cri.SecurityProfile(), "readonly_rootfs": True}
        said = await self.said("grep ^Seccomp: /proc/self/status; touch /x || echo kept", context=context)
        self.assertTrue(said.startswith("Seccomp:\t2\n"), said)
        self.assertTrue(said.endswith("kept\n"), said)

    async def test_a_device_of_the_vm(self) -> None:
        device = cri.Device(host_path="/dev/zero", container_path="/dev/sub/mine", permissions="r")
        said = await self.said("head -c 3 /dev/sub/mine | wc -c; ls /dev/null", devices=[device])
        self.assertEqual(said, "3\n/dev/null\n")

    async def test_privileged_it_has_all_capabilities_in_it_and_the_vms_devices(self) -> None:
        said = await self.said(
            "grep CapEff /proc/self/status; ls /dev | wc -l; chroot / true && echo may",
            context={"privileged": True},
        )
        self.assertRegex(said, r"^CapEff:\t[0-9a-f]*fff\n[0-9]+\nmay\n$")

    async def test_a_terminal(self) -> None:
        id = await self.run_container("sh", "-c", "tty; id -u; stat -c %u $(tty)", tty=True)
        await self.ended(id)
        text = await self.text(id)
        self.assertEqual(text.split(), ["/dev/pts/0", "0", "0"])

    async def test_sysctls_of_its_own_ipc(self) -> None:
        options = namespaces(ipc=cri.CONTAINER)
        config = pod(options)
        config.linux.sysctls["kernel.shmmni"] = "77"
        id = secrets.token_hex(16)
        own = cri.ContainerConfig(command=["cat", "/proc/sys/kernel/shmmni"], linux=of_container(options))
        await self.provider.create(id, self.image_id, own, config)
        await self.provider.start_container(id)
        await self.ended(id)
        self.assertEqual([record.line for record in await self.lines(id)], [b"77"])


class VolumeTests(UserNamespaceCase):
    """The pod's volumes."""

    def mount(self, at: str, **fields: Any) -> cri.Mount:
        return cri.Mount(container_path=at, image=cri.ImageSpec(image=FILES.id), readonly=True, **fields)

    async def test_images_have_the_pods_ids_where_that_is_asked_for(self) -> None:
        await self.load(FILES)
        mounts = [self.mount("/own", uidMappings=ids(), gidMappings=ids()), self.mount("/plain")]
        said = await self.said("stat -c '%u:%g' /own/low /own/both /plain/low; cat /own/both", mounts=mounts)
        self.assertEqual(said, "0:0\n0:0\n65534:65534\nhigh\n")
        other = self.mount("/own", uidMappings=ids(5), gidMappings=ids(5))
        words = await self.refused(InvalidArgument, self.create("true", mounts=[other]))
        self.assertIn("/own", words)
        for state in await self.provider.containers():
            await self.provider.remove(state.id)
        await self.provider.remove_image(FILES.id)
        self.assertEqual(os.listdir(self.run_dir / "oci" / "volumes"), [])

    async def test_files_with_the_pods_ids_are_as_they_would_be_inside(self) -> None:
        volume = self.base / "volumes" / "v"
        volume.mkdir(parents=True)
        (volume / "file").write_text("text\n")
        for path in (volume, volume / "file"):
            os.chown(path, FIRST, FIRST)
            path.chmod(0o700)
        volume.parent.chmod(0o700)
        mounts = [
            cri.Mount(container_path="/v", host_path=str(volume)),
            cri.Mount(container_path="/f", host_path=str(volume / "file")),
            cri.Mount(container_path="/r", host_path=str(volume), readonly=True, recursive_read_only=True),
        ]
        said = await self.said("cat /v/file /f; touch /v/new /r/new; stat -c %u /r/new", mounts=mounts)
        self.assertTrue(said.startswith("text\ntext\n"), said)
        self.assertIn("/r/new: Read-only file system", said)
        self.assertEqual((volume / "new").stat().st_uid, FIRST)
