# SPDX-License-Identifier: Apache-2.0
"""Containers get what their configuration asks for, as seen from within: for providers that isolate them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from tests.contract.container_provider_case import ContainerProviderCase
from tests.support.oci import busybox, image, layer

_FILES = image(
    [
        layer({"top": b"top\n", "run": b"#!/bin/sh\n", "a": ("dir", "755"), "a/file": b"below\n"}),
        layer({"a/more": b"more\n", "inside": ("link", "/a"), "outside": ("link", "../../../etc")}),
    ]
)


def number(value: int) -> Any:
    return cri.Int64Value(value=value)


def cgroup_lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()


def memory_limit(pid: int) -> int | None:
    """Return the limit of a process's cgroup in bytes; None: it has none."""
    own = {line.split(":")[1]: line.split(":")[2] for line in cgroup_lines(pid)}
    if "memory" in own:  # a machine with cgroup v1
        found = Path(f"/sys/fs/cgroup/memory{own['memory']}/memory.limit_in_bytes").read_text()
        return int(found) if int(found) < 1 << 60 else None
    found = Path(f"/sys/fs/cgroup{own['']}/memory.max").read_text().strip()
    return None if found == "max" else int(found)


class SemanticsCase(ContainerProviderCase):
    """Runs containers that print what they see."""

    run_dir: Path  # the provider's run directory

    async def said(self, script: str, context: Any = None, sandbox: Any = None, **fields: Any) -> str:
        """Return the output of a container that runs `script`."""
        linux = fields.pop("linux", None) or cri.LinuxContainerConfig(security_context=context)
        script = f"exec 2>&1; {script}"  # the order of lines from two streams would not be known
        config = cri.ContainerConfig(command=["sh", "-c", script], linux=linux, **fields)
        id = os.urandom(16).hex()
        await self.provider.create(id, self.image_id, config, sandbox or cri.PodSandboxConfig())
        await self.provider.start_container(id)
        await self.ended(id)
        return "".join(record.line.decode() + "\n" for record in await self.lines(id))

    def secured(self, **fields: Any) -> Any:
        return cri.LinuxContainerSecurityContext(**fields)


class UserContract(SemanticsCase):
    """The user and the groups of a container's first process."""

    async def who(self, **fields: Any) -> str:
        return (await self.said("id", self.secured(**fields))).strip()

    async def test_users_and_groups_by_id_and_by_name(self) -> None:
        app = "uid=1000(app) gid=1000(app) groups=1000(app),2000(extra)"
        self.assertEqual(await self.who(run_as_user=number(1000)), app)
        self.assertEqual(await self.who(run_as_username="app", supplemental_groups=[3000]), app + ",3000")
        self.assertEqual(await self.who(run_as_user=number(5)), "uid=5 gid=0(root) groups=0(root)")

    async def test_a_group_of_its_own_takes_no_membership_away(self) -> None:
        self.assertEqual(
            await self.who(run_as_username="app", run_as_group=number(6), supplemental_groups=[7]),
            "uid=1000(app) gid=6 groups=6,7,2000(extra)",
        )

    async def test_strict_groups_are_exactly_the_configured_ones(self) -> None:
        strict = {"supplemental_groups_policy": cri.Strict, "supplemental_groups": [7]}
        self.assertEqual(
            await self.who(run_as_user=number(1000), **strict),
            "uid=1000(app) gid=1000(app) groups=7,1000(app)",
        )
        self.assertEqual(
            await self.who(run_as_user=number(1000), run_as_group=number(6), **strict),
            "uid=1000(app) gid=6 groups=6,7",
        )
        state = [one for one in await self.provider.containers() if one.state == cri.CONTAINER_EXITED]
        self.assertEqual(len(state), 2, "what was made to read the image's users is gone")

    async def test_a_user_that_the_image_lacks_is_refused(self) -> None:
        context = self.secured(run_as_username="nobody-here", supplemental_groups_policy=cri.Strict)
        words = await self.refused(InvalidArgument, self.said("id", context))
        self.assertIn("nobody-here", words)


class PrivilegeContract(SemanticsCase):
    """The privileges of a container's processes."""

    async def capabilities(self, **fields: Any) -> int:
        context = self.secured(capabilities=cri.Capability(**fields))
        return int((await self.said("grep CapEff /proc/self/status", context)).split()[1], 16)

    async def test_capabilities(self) -> None:
        net_admin, net_raw, chown = 1 << 12, 1 << 13, 1 << 0
        added = await self.capabilities(add_capabilities=["NET_ADMIN"], drop_capabilities=["NET_RAW"])
        self.assertEqual(added & (net_admin | net_raw | chown), net_admin | chown)
        only = await self.capabilities(
            add_capabilities=["NET_ADMIN", "CHOWN"], drop_capabilities=["ALL", "CHOWN"]
        )
        self.assertEqual(only, net_admin)
        none = await self.capabilities(add_capabilities=["ALL"], drop_capabilities=["ALL"])
        self.assertEqual(none, 0)

    async def test_no_new_privileges_and_a_root_that_is_read_only(self) -> None:
        context = self.secured(no_new_privs=True, readonly_rootfs=True)
        said = await self.said(
            "grep NoNewPrivs /proc/self/status; touch /file; pwd", context, working_dir="/w/x"
        )
        self.assertIn("NoNewPrivs:\t1", said)
        self.assertIn("Read-only file system", said)
        self.assertTrue(said.endswith("/w/x\n"), "a working directory is made where it is missing")

    async def test_masked_and_read_only_paths_are_exactly_the_listed_ones(self) -> None:
        look = "head -c 1 /proc/timer_list | wc -c; cat /proc/self/mountinfo | cut -d' ' -f 5,6 | grep /proc/"
        paths = {"masked_paths": ["/proc/timer_list"], "readonly_paths": ["/proc/sys"]}
        said = await self.said(look, self.secured(**paths))
        self.assertRegex(said, r"\A0\n")
        self.assertRegex(said, r"/proc/sys ro")
        said = await self.said(look, self.secured())
        self.assertNotIn("/proc/", said)

    async def test_seccomp(self) -> None:
        kinds = cri.SecurityProfile
        mode = "grep Seccomp: /proc/self/status | cut -f 2; chmod 700 /tmp && echo changed"
        for fields, expected in (
            ({}, "0\nchanged\n"),
            ({"seccomp": kinds(profile_type=kinds.Unconfined)}, "0\nchanged\n"),
            ({"seccomp": kinds(profile_type=kinds.RuntimeDefault)}, "2\nchanged\n"),
            ({"seccomp_profile_path": "runtime/default"}, "2\nchanged\n"),
        ):
            self.assertEqual(await self.said(mode, self.secured(**fields)), expected, fields)
        denied = {"names": ["chmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
        profile = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [denied]})
        context = self.secured(seccomp=kinds(profile_type=kinds.Localhost, localhost_ref=profile))
        self.assertEqual(await self.said(mode, context), "2\nchmod: /tmp: Function not implemented\n")


class NamespaceContract(SemanticsCase):
    """The namespaces that a container shares."""

    async def test_process_namespaces(self) -> None:
        option = cri.NamespaceOption
        target = await self.run_container(
            "sleep", "600", linux=cri.LinuxContainerConfig(
                security_context=self.secured(namespace_options=option(pid=cri.CONTAINER))
            ),
        )  # fmt: skip
        look = "readlink /proc/self/ns/pid; tr '\\0' ' ' < /proc/1/cmdline; true"
        own = os.readlink("/proc/self/ns/pid")
        said = await self.said(look, self.secured(namespace_options=option(pid=cri.NODE)))
        self.assertTrue(said.startswith(own), said)
        said = await self.said(look, self.secured(namespace_options=option(pid=cri.CONTAINER)))
        self.assertNotIn(own, said)
        self.assertIn("\nsh -c", said)
        joined = self.secured(namespace_options=option(pid=cri.TARGET, target_id=target))
        self.assertIn("\nsleep 600", await self.said(look, joined))

    def sharing(self) -> cri.LinuxContainerConfig:
        """Return the configuration of a container that shares its pod's processes."""
        options = cri.NamespaceOption(pid=cri.POD)
        return cri.LinuxContainerConfig(security_context=self.secured(namespace_options=options))

    async def processes_of(self, id: str) -> str:
        """Return the PID namespace of a running container, as a link's text."""
        return os.readlink(f"/proc/{(await self.state(id)).pid}/ns/pid")

    async def test_the_pods_containers_share_processes_with_each_other_alone(self) -> None:
        first = await self.run_container("sleep", "600", linux=self.sharing())
        second = await self.run_container("sh", "-c", "sleep 700; true", linux=self.sharing())
        shared = await self.processes_of(first)
        self.assertEqual(await self.processes_of(second), shared)
        self.assertNotEqual(shared, os.readlink("/proc/self/ns/pid"))
        listed = await self.provider.exec_sync(second, ["ps", "-o", "args"], 30.0, 9999)
        found = {line for line in listed.stdout.decode().splitlines()[1:] if not line.startswith("ps ")}
        others = found - {"sleep 600", "sleep 700", "sh -c sleep 700; true"}
        self.assertLessEqual(len(others), 2, listed)  # the init, and what it may wait for
        await self.restarted()
        # It can end what is its pod's, and nothing else.
        await self.said("kill -9 -1", self.sharing().security_context)
        self.assertEqual((await self.ended(first)).exit_code, 137)
        await self.ended(second)
        target = await self.run_container("sleep", "600", linux=self.sharing())
        await self.provider.remove(first)
        await self.provider.remove(second)
        joined = cri.NamespaceOption(pid=cri.TARGET, target_id=target)
        said = await self.said("readlink /proc/self/ns/pid", self.secured(namespace_options=joined))
        self.assertEqual(said.strip(), await self.processes_of(target))

    async def test_the_end_of_one_that_shares_them_ends_all_of_its_processes_and_no_others(self) -> None:
        other = await self.run_container("sleep", "600", linux=self.sharing())
        script = "sleep 601 & setsid sh -c 'sleep 602 & exec sleep 603' & exec sleep 600"
        for how in (0, 1):
            one = await self.run_container("sh", "-c", f"trap 'exit 3' TERM; {script}", linux=self.sharing())
            await self.until(lambda: len(self.sleeping()) == 3, "its processes run")
            await self.provider.stop_container(one, how)
            await self.ended(one)
            await self.until(lambda: not self.sleeping(), "none is left")
        brief = await self.run_container(
            "sh", "-c", f"{script.rpartition('&')[0]}& exit 5", linux=self.sharing()
        )
        self.assertEqual((await self.ended(brief)).exit_code, 5)
        await self.until(lambda: not self.sleeping(), "none is left")
        self.assertEqual((await self.state(other)).state, cri.CONTAINER_RUNNING)

    def sleeping(self) -> set[str]:
        """Return the commands of the previous test's processes that run on this machine."""
        found = set()
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.add(file.read_bytes())
        return {f"{each}" for each in (601, 602, 603) if b"sleep\0%d\0" % each in found}

    async def test_when_the_pods_first_process_is_killed_the_next_container_gets_another(self) -> None:
        first = await self.run_container("sleep", "600", linux=self.sharing())
        made = await self.create("sleep", "600", linux=self.sharing())
        before = await self.processes_of(first)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "status").read_text().split("NSpid:")[1].splitlines()[0].split()
                if words[1:] == ["1"] and os.readlink(process / "ns/pid") == before:
                    os.kill(int(words[0]), signal.SIGKILL)
        self.assertEqual((await self.ended(first)).exit_code, 137)
        await self.provider.start_container(made)
        last = await self.run_container("sleep", "600", linux=self.sharing())
        self.assertEqual(await self.processes_of(last), await self.processes_of(made))

    async def test_ipc_of_its_own_has_the_pods_sysctls(self) -> None:
        look = "readlink /proc/self/ns/ipc; cat /proc/sys/kernel/shm_rmid_forced; readlink /proc/self/ns/net"
        sysctls = {"kernel/shm_rmid_forced": "1", "net.ipv4.ip_unprivileged_port_start": "1024"}
        sandbox = cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(sysctls=sysctls))
        for mode, shared in ((cri.POD, True), (cri.CONTAINER, False)):
            context = self.secured(namespace_options=cri.NamespaceOption(ipc=mode))
            ipc, value, net = (await self.said(look, context, sandbox)).split()
            self.assertEqual(ipc == os.readlink("/proc/self/ns/ipc"), shared)
            self.assertEqual(net, os.readlink("/proc/self/ns/net"))
            if not shared:
                self.assertEqual(value, "1")


class ProcessContract(SemanticsCase):
    """A container's command, environment, devices and limits."""

    #: Whether a limit of processor time can be removed on this machine.
    frees_processor: ClassVar[bool] = True
    #: Whether a limit of memory can.
    frees_memory: ClassVar[bool] = True

    async def test_environment_arguments_and_devices(self) -> None:
        envs = [cri.KeyValue(key="A", value=b"1"), cri.KeyValue(key="B", value="ü =\n'$A'".encode())]
        envs.append(cri.KeyValue(key="A", value=b"2"))
        envs.append(cri.KeyValue(key="BINARY", value=b"\1\xff\xfeb"))
        said = await self.said(
            'echo "$A|$B|$BINARY|$PATH"; ls -l /dev/nothing; echo x > /dev/nothing', envs=envs,
            devices=[cri.Device(host_path="/dev/kmsg", container_path="/dev/nothing", permissions="r")],
        )  # fmt: skip
        self.assertIn("2|ü =\n'$A'|\1\ufffd\ufffdb|/bin\n", said)
        self.assertRegex(said, r"crw.* 1, +11 .*/dev/nothing")
        self.assertIn("can't create /dev/nothing: Operation not permitted", said)

    async def test_what_is_too_long_for_the_kernel_fails_the_start(self) -> None:
        most = 32 * resource.getpagesize() - 1  # bytes, with the NUL at the end not counted
        long = cri.KeyValue(key="BIG", value=b"x" * (most - 4))
        id = await self.run_container("sh", "-c", "echo ${#BIG}", envs=[long])
        await self.ended(id)
        self.assertEqual([each.line for each in await self.lines(id)], [b"%d" % (most - 4)])
        longer = cri.KeyValue(key="BIG", value=long.value + b"x")
        many = [cri.KeyValue(key=f"V{index}", value=b"x" * 100_000) for index in range(24)]
        built = busybox({"Env": ["PATH=/bin", f"HUGE={'x' * most}"]})
        await self.load(built)
        cases: Any = (
            ({"envs": [longer]}, "variable BIG"),
            ({"envs": many}, "quarter"),
            ({"args": ["true", "ä" * (most // 2 + 1)]}, "argument 4"),
            ({"image": built.id}, "variable HUGE"),
        )
        for fields, said in cases:
            self.image_id = fields.pop("image", self.image_id)
            id = await self.create("sh", "-c", "sleep 600", **fields)
            words = await self.refused(InvalidArgument, self.provider.start_container(id))
            self.assertIn("argument list too long", words)
            self.assertIn(said, words)
            self.assertEqual((await self.state(id)).state, cri.CONTAINER_EXITED)

    async def test_beyond_its_memory_it_is_killed(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=16 << 20)
        id = await self.run_container(
            "dd", "if=/dev/zero", "of=/dev/null", "bs=64M", linux=cri.LinuxContainerConfig(resources=limits)
        )
        state = await self.ended(id)
        self.assertEqual((state.exit_code, state.reason), (137, "OOMKilled"))

    async def test_a_process_of_it_that_was_killed_for_its_memory_is_not_its_end(self) -> None:
        limits = cri.LinuxContainerConfig(
            resources=cri.LinuxContainerResources(memory_limit_in_bytes=16 << 20)
        )
        greedy = "dd if=/dev/zero of=/dev/null bs=64M; echo $?; "
        for code, reason in ((0, "Completed"), (3, "Error"), (143, "Error"), (137, "OOMKilled")):
            id = await self.run_container("sh", "-c", f"{greedy} exit {code}", linux=limits)
            state = await self.ended(id)
            self.assertEqual((state.exit_code, state.reason), (code, reason))
            self.assertIn(b"137", [record.line for record in await self.lines(id)])

    async def test_limits_are_changed_while_it_runs_and_before(self) -> None:
        limits = cri.LinuxContainerResources(
            cpu_shares=512, cpu_period=100000, cpu_quota=50000, memory_limit_in_bytes=64 << 20,
            oom_score_adj=100,
        )  # fmt: skip
        id = await self.create("sleep", "600", linux=cri.LinuxContainerConfig(resources=limits))
        await self.provider.update(id, cri.LinuxContainerResources(oom_score_adj=200, cpu_shares=256))
        state = await self.provider.start_container(id)
        score = Path(f"/proc/{state.pid}/oom_score_adj")
        self.assertEqual(score.read_text(), "200\n")
        quota = -1 if self.frees_processor else 60000
        later = cri.LinuxContainerResources(
            memory_limit_in_bytes=96 << 20, cpu_quota=quota, oom_score_adj=300
        )
        found = (await self.provider.update(id, later)).resources
        self.assertEqual(score.read_text(), "300\n")
        self.assertEqual(
            (found.memory_limit_in_bytes, found.cpu_quota, found.cpu_shares, found.oom_score_adj),
            (96 << 20, quota, 256, 300),
        )
        self.assertEqual(memory_limit(state.pid), 96 << 20)

    async def test_a_limit_of_memory_is_taken_away(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=64 << 20)
        id = await self.run_container("sleep", "600", linux=cri.LinuxContainerConfig(resources=limits))
        pid = (await self.state(id)).pid
        self.assertEqual(memory_limit(pid), 64 << 20)
        unlimited = cri.LinuxContainerResources(memory_limit_in_bytes=-1)
        if not self.frees_memory:
            words = await self.refused(InvalidArgument, self.provider.update(id, unlimited))
            self.assertIn("memory_limit", words)
            return
        for _ in range(2):
            state = await self.provider.update(id, unlimited)
            self.assertEqual(state.resources.memory_limit_in_bytes, -1)
            self.assertEqual(memory_limit(pid), None)
        await self.provider.update(id, limits)
        self.assertEqual(memory_limit(pid), 64 << 20)

    async def test_the_stop_signal_is_the_containers(self) -> None:
        script = (
            "trap 'echo got it; exit 5' USR1; trap 'exit 6' TERM; echo ready; while true; do sleep 0.1; done"
        )
        id = await self.run_container("sh", "-c", script, stop_signal=cri.SIGUSR1)

        async def ready() -> bool:
            return bool(await self.lines(id))

        await self.until(ready, "it is ready")
        state = await self.provider.stop_container(id, 30)
        self.assertEqual((state.exit_code, state.reason), (5, "Error"))


class ImageVolumeContract(SemanticsCase):
    """Images mounted as volumes."""

    #: The directory below `run_dir` where images are mounted.
    volumes: ClassVar[str]

    async def tearDown(self) -> None:
        await super().tearDown()
        self.assertNotIn(str(self.run_dir / self.volumes), Path("/proc/self/mountinfo").read_text())

    def mount(self, sub_path: str = "", at: str = "/volume", image_id: str = _FILES.id) -> Any:
        return cri.Mount(
            container_path=at, image=cri.ImageSpec(image=image_id), image_sub_path=sub_path, readonly=True
        )

    async def test_all_of_it_and_what_is_below_a_path(self) -> None:
        await self.load(_FILES)
        mounts = [self.mount(), self.mount("a", "/sub"), self.mount("inside/more", "/more")]
        said = await self.said(
            "cat /volume/top /volume/a/file /volume/a/more /sub/file /more; ls /sub; touch /volume/x /sub/x;"
            "chmod +x /volume/run; grep ' /sub ' /proc/self/mountinfo",
            mounts=mounts,
        )
        self.assertTrue(said.startswith("top\nbelow\nmore\nbelow\nmore\nfile\nmore\n"), said)
        self.assertEqual(said.count("Read-only file system"), 3)
        self.assertRegex(said, r" /a /sub ro,[^ ]*noexec")

    async def test_one_of_a_single_layer(self) -> None:
        built = image([layer({"only": b"only\n"})])
        await self.load(built)
        said = await self.said("cat /volume/only", mounts=[self.mount(image_id=built.id)])
        self.assertEqual(said, "only\n")

    async def test_it_remains_while_a_container_uses_it(self) -> None:
        await self.load(_FILES)
        id = await self.run_container("sleep", "600", mounts=[self.mount()])
        words = await self.refused(FailedPrecondition, self.provider.remove_image(_FILES.id))
        self.assertIn(_FILES.id, words)
        await self.restarted()
        await self.provider.remove(id)
        await self.provider.remove_image(_FILES.id)
        self.assertNotIn(_FILES.id, await self.provider.images())

    async def test_missing_paths_are_refused(self) -> None:
        await self.load(_FILES)
        for sub_path in ("none", "outside/passwd", "top/below", "../../etc/passwd"):
            words = await self.refused(InvalidArgument, self.said("true", mounts=[self.mount(sub_path)]))
            self.assertIn("/volume", words)
        missing = self.mount(image_id="sha256:" + "0" * 64)
        await self.refused(FailedPrecondition, self.said("true", mounts=[missing]))


class MountContract(SemanticsCase):
    """Mount propagation between a pod's containers, and the restrictions of mounts."""

    modes: Sequence[bool] = (False, True)  # whether a mount is read-only; its restrictions hold in each

    async def setUp(self) -> None:
        await super().setUp()
        self.shared = self.run_dir / "shared"
        self.shared.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(self.shared)], check=True)
        subprocess.run(["mount", "--make-shared", str(self.shared)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-R", "-l", str(self.shared)], check=True)
        self.outer = str(self.shared)

    def mount(self, propagation: Any) -> Any:
        return cri.Mount(container_path="/shared", host_path=self.outer, propagation=propagation)

    async def test_a_mount_appears_where_it_is_asked_for(self) -> None:
        ids = {}
        for mode in (
            cri.PROPAGATION_PRIVATE,
            cri.PROPAGATION_HOST_TO_CONTAINER,
            cri.PROPAGATION_BIDIRECTIONAL,
        ):
            ids[mode] = await self.run_container("sleep", "600", mounts=[self.mount(mode)])
        (self.shared / "below").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(self.shared / "below")], check=True)
        (self.shared / "below" / "file").write_text("here\n")
        for mode, id in ids.items():
            ran = await self.provider.exec_sync(id, ["ls", "/shared/below"], 30.0, 1000)
            self.assertEqual(ran.stdout == b"file\n", mode != cri.PROPAGATION_PRIVATE, mode)

    async def test_what_a_file_system_of_the_vm_does_not_allow_a_container_may_not_do_there(self) -> None:
        closed = ["nosuid", "nodev", "noexec"]
        remount = ["mount", "-o", ",".join(["remount", "bind", *closed]), str(self.shared)]
        subprocess.run(remount, check=True)
        for read_only in self.modes:
            mount = cri.Mount(container_path="/shared", host_path=self.outer, readonly=read_only)
            said = await self.said("grep ' /shared ' /proc/mounts", mounts=[mount])
            found = said.split()[3].split(",")
            self.assertEqual([each for each in closed if each not in found], [], said)
            self.assertIn("ro" if read_only else "rw", found)
