# SPDX-License-Identifier: Apache-2.0
"""What a specification says holds in a container that crun really runs."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import cri
from tests.harness.needs import needs_crun
from tests.harness.tools import need
from tests.support.crun import CGROUPS, crun_for_here, make_rootfs, remove_cgroups
from vmserver.containers.oci.capabilities import DEFAULT, in_mask
from vmserver.containers.oci.image import ImageDefaults
from vmserver.containers.oci.kernel import Kernel, find_kernel
from vmserver.containers.oci.limits import update_resources
from vmserver.containers.oci.lookup import look_up
from vmserver.containers.oci.spec import NewContainer, container_spec, process_spec

SECONDS = 30.0
PASSWD = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n"
GROUP = "root:x:0:\nann:x:1000:\nstaff:x:50:bob,ann\n"

# Both containers start in one mount namespace; `crun_for_here` makes a new one for each.
SHARING = """
umount /sys/fs/cgroup/unified 2>/dev/null
mount --make-rshared {source}
for each in "{reading} {reader}" "{writing} {writer}"; do
    {crun} run --detach --bundle $each </dev/null >/dev/null 2>&1
done
{crun} exec --process {directory}/mount {writer}
{crun} exec --process {directory}/ls {reader}
ls {source}/below
{crun} delete --force {writer}
{crun} delete --force {reader}
"""


@attrs.frozen
class Ended:
    code: int
    output: str
    errors: str


@needs_crun
class SpecCase(SynchronousTestCase):
    """Run containers with a root of busybox."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="spec-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.addCleanup(remove_cgroups)
        self.rootfs = self.directory / "rootfs"
        make_rootfs(self.rootfs)
        etc = self.rootfs / "etc"
        etc.mkdir()
        (etc / "passwd").write_text(PASSWD)
        (etc / "group").write_text(GROUP)
        self.crun = [crun_for_here(self.directory), "--root", str(self.directory / "crun-state")]
        # The wrapper of `crun_for_here` leaves behind cgroups of version 1.
        self.kernel: Kernel = find_kernel()
        self.files: dict[str, Path] = {}
        self.images: dict[int, str] = {}
        self.made: Any = {}

    def bundle(self, config: cri.ContainerConfig, **others: Any) -> tuple[str, Path]:
        """Write a bundle; return the container's id and its directory."""
        id = f"c-{uuid.uuid4().hex[:8]}"
        image = ImageDefaults(command=("sh",))
        values: dict[str, Any] = {
            "id": id,
            "config": config,
            "sandbox_config": cri.PodSandboxConfig(),
            "image": image,
            "rootfs": self.rootfs,
            "lookup": look_up(config, image, self.rootfs, self.files, self.images),
            "kernel": self.kernel,
            "cgroup": f"/{CGROUPS}/{id}",
            "init_pid": os.getpid(),
        }
        self.made = container_spec(NewContainer(**{**values, **others}))
        bundle = self.directory / id
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self.made))
        return id, bundle

    def config(self, script: str, **fields: Any) -> cri.ContainerConfig:
        """Return a configuration; `context` and `resources` are of its `linux`."""
        linux = cri.LinuxContainerConfig(resources=fields.pop("resources", None))
        if "context" in fields:
            linux.security_context.CopyFrom(fields.pop("context"))
        return cri.ContainerConfig(command=["sh", "-c", script], linux=linux, **fields)

    def call(self, *arguments: str) -> Ended:
        done = subprocess.run([*self.crun, *arguments], capture_output=True, text=True, timeout=SECONDS)
        return Ended(done.returncode, done.stdout, done.stderr)

    def run_to_end(self, script: str, others: Any = None, **fields: Any) -> Ended:
        """Run a script in a container of its own."""
        id, bundle = self.bundle(self.config(script, **fields), **(others or {}))
        return self.call("run", "--bundle", str(bundle), id)

    def output(self, script: str, others: Any = None, **fields: Any) -> str:
        ended = self.run_to_end(script, others, **fields)
        self.assertEqual((ended.code, ended.errors), (0, ""), ended.output)
        return ended.output

    def status(self, **fields: Any) -> dict[str, str]:
        """Return /proc/self/status as a process in a container sees it."""
        lines = self.output("exec cat /proc/self/status", **fields).splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def started(self, script: str = "exec sleep 600", others: Any = None, **fields: Any) -> str:
        """Start a container that runs until the test ends. Return its id."""
        id, bundle = self.bundle(self.config(script, **fields), **(others or {}))
        done = subprocess.run(
            [*self.crun, "run", "--detach", "--bundle", str(bundle), id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.directory / "errors").open("w"),
            timeout=SECONDS,
        )
        self.assertEqual(done.returncode, 0, (self.directory / "errors").read_text())
        self.addCleanup(self.call, "delete", "--force", id)
        return id

    def pid(self, id: str) -> int:
        return int(json.loads(self.call("state", id).output)["pid"])

    def execute(self, id: str, command: Sequence[str]) -> Ended:
        """Run a command in a container."""
        spec = json.loads((self.directory / id / "config.json").read_text())
        process = self.directory / "process.json"
        process.write_text(json.dumps(process_spec(spec, command, False)))
        return self.call("exec", "--process", str(process), id)

    def mounted(self, at: Path, *options: str) -> None:
        """Mount something on this machine for as long as the test runs."""
        subprocess.run(["mount", *options, str(at)], check=True, timeout=SECONDS)
        self.addCleanup(subprocess.run, ["umount", "--lazy", str(at)], check=True, timeout=SECONDS)


class UserTests(SpecCase):
    def ids(self, **fields: Any) -> list[str]:
        context = cri.LinuxContainerSecurityContext(**fields)
        script = "id -u; id -g; cat /proc/self/status | grep ^Groups | cut -f2; echo $HOME; umask"
        return [line.strip() for line in self.output(script, context=context).splitlines()]

    def test_users_are_those_of_the_image(self) -> None:
        self.assertEqual(self.ids(), ["0", "0", "0", "/root", "0022"])
        self.assertEqual(self.ids(run_as_username="ann"), ["1000", "1000", "50 1000", "/home/ann", "0022"])
        number = cri.Int64Value(value=1000)
        strict = self.ids(run_as_user=number, supplemental_groups=[7], supplemental_groups_policy=cri.Strict)
        self.assertEqual(strict[2], "7 1000")
        merged = self.ids(run_as_user=number, run_as_group=cri.Int64Value(value=3), supplemental_groups=[7])
        self.assertEqual(merged[:4], ["1000", "3", "3 7 50", "/home/ann"])
        self.assertEqual(self.ids(run_as_user=cri.Int64Value(value=77))[:4], ["77", "0", "0", "/"])

    def test_the_working_directory_is_made(self) -> None:
        self.assertEqual(self.output("pwd; stat -c %u:%a .", working_dir="/a/b"), "/a/b\n0:755\n")


class ConfinementTests(SpecCase):
    def test_capabilities(self) -> None:
        plain = self.status()
        for kind in ("CapBnd", "CapEff", "CapPrm"):
            self.assertEqual(in_mask(int(plain[kind], 16)), DEFAULT)
        user = cri.Int64Value(value=1000)
        ambient = cri.Capability(drop_capabilities=["ALL"], add_ambient_capabilities=["NET_ADMIN"])
        kept = self.status(context=cri.LinuxContainerSecurityContext(run_as_user=user, capabilities=ambient))
        for kind in ("CapBnd", "CapEff", "CapPrm", "CapAmb", "CapInh"):
            self.assertEqual(in_mask(int(kept[kind], 16)), {"CAP_NET_ADMIN"}, kind)
        other = self.status(context=cri.LinuxContainerSecurityContext(run_as_user=user))
        self.assertEqual(int(other["CapEff"], 16), 0)

    def test_no_new_privileges(self) -> None:
        context = cri.LinuxContainerSecurityContext(no_new_privs=True)
        self.assertEqual(self.status(context=context)["NoNewPrivs"], "1")
        self.assertEqual(self.status()["NoNewPrivs"], "0")

    def test_the_default_profile_of_seccomp(self) -> None:
        context = cri.LinuxContainerSecurityContext(seccomp=cri.SecurityProfile())
        script = "grep ^Seccomp: /proc/self/status; unshare -U true; echo $?"
        ended = self.run_to_end(script, context=context)
        self.assertEqual(ended.output, "Seccomp:\t2\n1\n")
        self.assertIn("Operation not permitted", ended.errors)

    def test_the_nodes_profile_of_seccomp(self) -> None:
        rules = [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 30}]
        text = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
        kind = cri.SecurityProfile.Localhost
        profile = cri.SecurityProfile(profile_type=kind, localhost_ref=text)
        ended = self.run_to_end("mkdir /x", context=cri.LinuxContainerSecurityContext(seccomp=profile))
        self.assertIn("Read-only file system", ended.errors)
        self.assertNotEqual(ended.code, 0)

    def test_paths_are_masked_and_read_only_as_they_are_listed(self) -> None:
        script = (
            "cat /proc/timer_list | wc -c; echo 1 > /proc/sys/kernel/domainname; echo $?; ls /sys/firmware"
        )
        context = cri.LinuxContainerSecurityContext(
            masked_paths=["/proc/timer_list", "/sys/firmware", "/no/such"], readonly_paths=["/proc/sys"]
        )
        ended = self.run_to_end(script, context=context)
        self.assertEqual(ended.output, "0\n1\n")
        self.assertIn("Read-only file system", ended.errors)
        unmasked = self.output(
            "head -c 1 /proc/kallsyms | wc -c; grep -c ' /proc/' /proc/self/mountinfo || true",
            context=cri.LinuxContainerSecurityContext(readonly_rootfs=False, no_new_privs=True),
        )
        self.assertEqual(unmasked, "1\n0\n")

    def test_a_read_only_root_has_mounts_that_can_be_written(self) -> None:
        volume = self.directory / "volume"
        volume.mkdir()
        context = cri.LinuxContainerSecurityContext(readonly_rootfs=True)
        ended = self.run_to_end(
            "touch /x; touch /data/x && echo written", {"volumes": {"/data": volume}}, context=context
        )
        self.assertEqual(ended.output, "written\n")
        self.assertIn("Read-only file system", ended.errors)
        self.assertEqual(os.listdir(volume), ["x"])

    def test_privileged(self) -> None:
        context = cri.LinuxContainerSecurityContext(privileged=True, seccomp=cri.SecurityProfile())
        script = "cat /proc/self/status; grep ' /sys ' /proc/self/mountinfo; ls /dev"
        found = self.output(script, context=context)
        self.assertIn("Seccomp:\t0\n", found)
        bounding = next(line for line in found.splitlines() if line.startswith("CapBnd"))
        self.assertEqual(in_mask(int(bounding.split()[1], 16)), self.kernel.capabilities)
        self.assertRegex(found, r" /sys rw,")
        devices = {"null", "zero"} | {Path(node["path"]).parts[2] for node in self.made["linux"]["devices"]}
        self.assertLessEqual(devices, set(found.split()))

    def test_a_device_may_be_used_as_it_is_permitted(self) -> None:
        host = self.directory / "device"
        os.mknod(host, stat.S_IFCHR | 0o640, os.makedev(10, 254))  # a device without a driver
        device = cri.Device(host_path=str(host), container_path="/dev/sub/mine", permissions="r")
        script = "stat -c '%F %a %t:%T' /dev/sub/mine; cat /dev/sub/mine; cat < /dev/null > /dev/sub/mine"
        ended = self.run_to_end(script, devices=[device])
        self.assertEqual(ended.output, "character special file 640 a:fe\n")
        self.assertRegex(ended.errors, r"No such device(.|\n)*Operation not permitted")


class MountTests(SpecCase):
    def mount(self, source: Path, **fields: Any) -> list[cri.Mount]:
        return [cri.Mount(container_path="/m", host_path=str(source), **fields)]

    def test_read_only_mounts_may_be_so_with_what_is_mounted_below(self) -> None:
        source = self.directory / "source"
        (source / "below").mkdir(parents=True)
        self.mounted(source / "below", "-t", "tmpfs", "tmpfs")
        script = "touch /m/x; touch /m/below/x && echo written"
        plain = self.run_to_end(script, mounts=self.mount(source, readonly=True))
        self.assertEqual((plain.output, plain.errors.count("Read-only")), ("written\n", 1))
        whole = self.run_to_end(script, mounts=self.mount(source, readonly=True, recursive_read_only=True))
        self.assertEqual((whole.output, whole.errors.count("Read-only")), ("", 2))

    def test_a_file_may_be_recursively_read_only_too(self) -> None:
        file = self.directory / "file"
        file.write_text("text")
        mounts = self.mount(file, readonly=True, recursive_read_only=True)
        ended = self.run_to_end("cat /m; echo x > /m", mounts=mounts)
        self.assertEqual(ended.output, "text")
        self.assertIn("Read-only file system", ended.errors)

    def test_the_sandboxes_files_are_there(self) -> None:
        hosts = self.directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        self.files = {"/etc/hosts": hosts, "/etc/resolv.conf": self.directory / "none"}
        self.assertEqual(self.output("cat /etc/hosts; ls /etc"), hosts.read_text() + "group\nhosts\npasswd\n")

    def test_a_volume_that_is_an_image_is_not_written_or_executed(self) -> None:
        image = self.directory / "image"
        image.mkdir()
        shutil.copy2(self.rootfs / "bin" / "busybox", image / "busybox")
        self.images = {0: str(image)}
        mounts = [cri.Mount(container_path="/m", image=cri.ImageSpec(image="sha256:x"))]
        ended = self.run_to_end("touch /m/x; /m/busybox true; echo $?", mounts=mounts)
        self.assertEqual(ended.output, "126\n")
        self.assertIn("Read-only file system", ended.errors)

    def test_a_symbolic_link_of_the_image_leads_nowhere_out_of_it(self) -> None:
        outside, source = self.directory / "outside", self.directory / "source"
        outside.mkdir()
        source.mkdir()
        (source / "mine").touch()
        (self.rootfs / "m").symlink_to(f"../../../../../../../..{outside}")
        self.assertEqual(self.output("ls /m", mounts=self.mount(source)), "mine\n")
        inside = self.rootfs / outside.relative_to("/")
        self.assertTrue(inside.is_dir())
        self.assertEqual(self.output("ls /m", mounts=self.mount(source)), "mine\n")
        (self.rootfs / "var").mkdir()
        (self.rootfs / "var" / "run").symlink_to("/run")
        mounts = [cri.Mount(container_path="/var/run/secrets/a/b", host_path=str(source))]
        for _ in ("made", "there"):
            self.assertEqual(self.output("ls /run/secrets/a/b", mounts=mounts), "mine\n")
        self.assertEqual((os.listdir(outside), os.listdir(inside)), ([], []))

    def test_later_mounts_of_the_machine_reach_a_container_that_asks_for_it(self) -> None:
        source = self.directory / "source"
        (source / "below").mkdir(parents=True)
        self.mounted(source, "--bind", str(source))
        subprocess.run(["mount", "--make-rshared", str(source)], check=True)
        kind = cri.PROPAGATION_HOST_TO_CONTAINER
        both = self.started(mounts=self.mount(source, propagation=kind))
        neither = self.started(mounts=self.mount(source))
        self.mounted(source / "below", "-t", "tmpfs", "tmpfs")
        (source / "below" / "new").touch()
        self.assertEqual(self.execute(both, ["ls", "/m/below"]).output, "new\n")
        self.assertEqual(self.execute(neither, ["ls", "/m/below"]).output, "")

    def test_mounts_of_a_container_reach_another_if_both_ask_for_it(self) -> None:
        source = self.directory / "source"
        (source / "below").mkdir(parents=True)
        both, slave = cri.PROPAGATION_BIDIRECTIONAL, cri.PROPAGATION_HOST_TO_CONTAINER
        self.mounted(source, "--bind", str(source))
        subprocess.run(["mount", "--make-rshared", str(source)], check=True)  # otherwise it is refused
        config = self.config("exec sleep 600", mounts=self.mount(source, propagation=slave))
        reader, reading = self.bundle(config)
        privileged = cri.LinuxContainerSecurityContext(privileged=True)
        mounts = self.mount(source, propagation=both)
        writer, writing = self.bundle(self.config("exec sleep 600", mounts=mounts, context=privileged))
        for name, command in (
            ("ls", "ls /m/below"),
            ("mount", "mount -t tmpfs t /m/below; touch /m/below/new"),
        ):
            process = process_spec(self.made, ["sh", "-c", command], False)
            (self.directory / name).write_text(json.dumps(process))
        script = SHARING.format(
            crun=f"{need('crun')} --root {self.directory}/state",
            source=source,
            directory=self.directory,
            reader=reader,
            reading=reading,
            writer=writer,
            writing=writing,
        )
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual((done.stdout, done.stderr), ("new\nnew\n", ""))


class NamespaceTests(SpecCase):
    def test_processes_of_its_own_or_all_of_the_vms(self) -> None:
        options = cri.NamespaceOption(pid=cri.CONTAINER)
        context = cri.LinuxContainerSecurityContext(namespace_options=options)
        self.assertEqual(self.output("echo $$", context=context), "1\n")
        self.assertNotEqual(self.output("echo $$"), "1\n")

    def test_the_processes_of_another_container(self) -> None:
        own = cri.NamespaceOption(pid=cri.CONTAINER)
        first = self.started(context=cri.LinuxContainerSecurityContext(namespace_options=own))
        target = cri.NamespaceOption(pid=cri.TARGET, target_id=first)
        found = self.output(
            "cat /proc/1/cmdline",
            {"target_pid": self.pid(first)},
            context=cri.LinuxContainerSecurityContext(namespace_options=target),
        )
        self.assertEqual(found, "sleep\x00600\x00")

    def test_shared_memory_and_sysctls(self) -> None:
        file = Path("/dev/shm") / f"test-{uuid.uuid4().hex}"
        file.touch()
        self.addCleanup(file.unlink)
        script = f"ls /dev/shm | grep -c {file.name}; cat /proc/sys/kernel/shmmni; ls -d /dev/mqueue"
        shared = self.output(script).splitlines()
        self.assertEqual((shared[0], shared[2]), ("1", "/dev/mqueue"))
        options = cri.NamespaceOption(ipc=cri.CONTAINER)
        sandbox = cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(sysctls={"kernel.shmmni": "77"}))
        alone = self.output(
            script,
            {"sandbox_config": sandbox},
            context=cri.LinuxContainerSecurityContext(namespace_options=options),
        )
        self.assertEqual(alone.splitlines(), ["0", "77", "/dev/mqueue"])

    def test_the_network_and_the_name_are_the_vms(self) -> None:
        own = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts")]
        self.assertEqual(
            self.output("for n in net uts; do readlink /proc/self/ns/$n; done").splitlines(), own
        )
        self.assertEqual(self.output("echo $HOSTNAME"), os.uname().nodename + "\n")


class ProcessTests(SpecCase):
    def test_a_command_in_a_container_is_confined_as_the_container(self) -> None:
        context = cri.LinuxContainerSecurityContext(
            run_as_username="ann", no_new_privs=True, seccomp=cri.SecurityProfile()
        )
        envs = [cri.KeyValue(key="MINE", value=b"a b")]
        id = self.started(context=context, envs=envs, working_dir="/tmp")
        ended = self.execute(id, ["sh", "-c", "id -u; pwd; echo $MINE $HOME; cat /proc/self/status"])
        self.assertEqual(ended.output.splitlines()[:3], ["1000", "/tmp", "a b /home/ann"], ended.errors)
        for line in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000"):
            self.assertIn(line, ended.output)

    def test_a_terminal(self) -> None:
        # It waits for a line: what crun finds on the terminal of an ended container is printed as an error.
        id, bundle = self.bundle(self.config("tty; echo $TERM; read line", tty=True))
        master, slave = pty.openpty()
        self.addCleanup(os.close, master)
        command = [*self.crun, "run", "--bundle", str(bundle), id]
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        output, deadline = b"", time.monotonic() + SECONDS
        while b"xterm" not in output and time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                output += os.read(master, 4096)
        self.assertEqual(output.split(), [b"/dev/pts/0", b"xterm"])
        os.write(master, b"\n")
        self.assertEqual(process.wait(SECONDS), 0)

    def test_limits_and_their_change(self) -> None:
        before = cri.LinuxContainerResources(
            memory_limit_in_bytes=64 * 2**20, cpu_shares=512, cpu_quota=50_000, oom_score_adj=321
        )
        id = self.started(resources=before)
        group = Path(f"/proc/{self.pid(id)}/cgroup").read_text()
        self.assertIn(f"/{CGROUPS}/{id}", group)
        self.assertEqual(Path(f"/proc/{self.pid(id)}/oom_score_adj").read_text(), "321\n")
        files = ("memory.max", "cpu.weight", "cpu.max")
        expected = ["67108864 20 50000 100000", "100663296 20 70000 100000"]
        if not self.kernel.cgroup2:
            files = ("memory/memory.limit_in_bytes", "cpu/cpu.shares", "cpu/cpu.cfs_quota_us")
            expected = ["67108864 512 50000", "100663296 512 70000"]

        def limits() -> str:
            paths = [f"/sys/fs/cgroup/{name}" for name in files]
            return " ".join(self.execute(id, ["cat", *paths]).output.split())

        self.assertEqual(limits(), expected[0])
        changes = cri.LinuxContainerResources(memory_limit_in_bytes=96 * 2**20, cpu_quota=70_000)
        file = self.directory / "resources.json"
        file.write_text(json.dumps(update_resources(before, changes, self.kernel)))
        done = self.call("update", "--resources", str(file), id)
        self.assertEqual((done.code, done.errors), (0, ""))
        self.assertEqual(limits(), expected[1])

    def test_files_that_may_be_open(self) -> None:
        self.assertEqual(self.output("ulimit -n"), f"{self.kernel.rlimits['RLIMIT_NOFILE']}\n")
