# SPDX-License-Identifier: Apache-2.0
"""A CRI ContainerConfig is translated for Docker, and refused where Docker does not support it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers.accounts import Accounts
from vmserver.containers.docker.accounts import DockerUser, configured, resolve
from vmserver.containers.docker.cgroups import extra_files as cgroup_files
from vmserver.containers.docker.security import seccomp_profile
from vmserver.containers.docker.translate import create_body
from vmserver.containers.resources import overlay
from vmserver.containers.signals import signal_name, signal_number

IMAGE = "sha256:" + "a" * 64
FILES = {"/etc/hosts": Path("/vm/hosts"), "/etc/resolv.conf": Path("/vm/resolv.conf")}
THERE = {"/data", "/dev/fuse", "/vm/hosts", "/vm/resolv.conf"}


def body(config: Any = None, **fields: Any) -> Any:
    """Return the request that creates a container with this configuration."""
    config = config or cri.ContainerConfig(**fields)
    return create_body(
        "c1",
        IMAGE,
        config,
        identity=configured(config.linux.security_context) or DockerUser("", ()),
        files=FILES,
        log_options={"max-size": "1m"},
        exists=THERE.__contains__,
        ipc_sysctls={"kernel.shmmax": "1"},
        image_paths={0: "/run/images/x"},
    )


def secured(**fields: Any) -> Any:
    """Return the request for a container with these fields of the security context."""
    context = cri.LinuxContainerSecurityContext(**fields)
    return body(linux=cri.LinuxContainerConfig(security_context=context))


class TranslateTests(SynchronousTestCase):
    def refused(self, word: str, work: Any, **fields: Any) -> None:
        with self.assertRaises(InvalidArgument) as caught:
            work(**fields)
        self.assertIn(word, str(caught.exception))

    def test_command_and_args_take_the_place_of_entrypoint_and_cmd(self) -> None:
        for command, args in ((["a"], []), (["a"], ["b"]), ([], ["b"]), ([], [])):
            found = body(command=command, args=args)
            self.assertEqual((found.get("Entrypoint", []), found.get("Cmd", [])), (command, args))
            self.assertEqual(("Entrypoint" in found, "Cmd" in found), (bool(command), bool(args)))

    def test_environment_stdin_terminal_and_signal(self) -> None:
        found = body(
            envs=[cri.KeyValue(key="A", value=b"b=c")], tty=True, stdin=True, stdin_once=True,
            working_dir="/w", stop_signal=cri.SIGRTMINPLUS3,
        )  # fmt: skip
        self.assertEqual(found["Env"], ["A=b=c"])
        self.assertEqual((found["Tty"], found["OpenStdin"], found["StdinOnce"]), (True, True, True))
        self.assertEqual((found["WorkingDir"], found["StopSignal"]), ("/w", "SIGRTMIN+3"))

    def test_it_shares_the_machines_network_name_and_ipc(self) -> None:
        host = body()["HostConfig"]
        self.assertEqual((host["NetworkMode"], host["UTSMode"], host["IpcMode"]), ("host", "host", "host"))

    def test_pid_and_ipc_namespaces(self) -> None:
        for pid, expected in (
            (cri.POD, "container:infranetes.init"),
            (cri.NODE, "host"),
            (cri.CONTAINER, ""),
        ):
            found = secured(namespace_options=cri.NamespaceOption(pid=pid))
            self.assertEqual(found["HostConfig"]["PidMode"], expected)
        target = cri.NamespaceOption(pid=cri.TARGET, target_id="c0", ipc=cri.CONTAINER)
        host = secured(namespace_options=target)["HostConfig"]
        self.assertEqual((host["PidMode"], host["IpcMode"]), ("container:infranetes-c0", "private"))
        self.refused("target_id", secured, namespace_options=cri.NamespaceOption(pid=cri.TARGET))
        self.refused("network", secured, namespace_options=cri.NamespaceOption(network=cri.CONTAINER))
        users = cri.UserNamespace(mode=cri.POD, uids=[cri.IDMapping(host_id=1, length=1)])
        self.refused("userns", secured, namespace_options=cri.NamespaceOption(userns_options=users))
        pod = cri.UserNamespace(mode=cri.POD)
        self.refused("userns", secured, namespace_options=cri.NamespaceOption(userns_options=pod))
        secured(namespace_options=cri.NamespaceOption(userns_options=cri.UserNamespace(mode=cri.NODE)))

    def test_the_pods_sysctls_are_repeated_for_an_ipc_namespace_of_its_own(self) -> None:
        host = secured(namespace_options=cri.NamespaceOption(ipc=cri.CONTAINER))["HostConfig"]
        self.assertEqual(host["Sysctls"], {"kernel.shmmax": "1"})
        self.assertNotIn("Sysctls", secured()["HostConfig"])

    def test_users_and_groups(self) -> None:
        value = lambda number: cri.Int64Value(value=number)  # noqa: E731
        self.assertEqual(secured(run_as_user=value(0))["User"], "0")
        self.assertEqual(secured(run_as_username="app")["User"], "app")
        self.assertNotIn("User", secured())
        self.assertEqual(secured(supplemental_groups=[7, 8])["HostConfig"]["GroupAdd"], ["7", "8"])
        self.refused("run_as_group", secured, run_as_group=value(6))
        self.refused("run_as_user", secured, run_as_user=value(-1))
        self.refused("supplemental_groups", secured, supplemental_groups=[-1])
        self.refused("run_as_user", secured, run_as_user=value(2**31))

    def test_users_and_groups_by_the_images_accounts(self) -> None:
        accounts = Accounts(
            b"# words\nroot:x:0:0::/:\nbroken:x:y:z\napp:x:10:11::/:\n20:x:30:31::/:\nlast:x:20:21::/:",
            b"root:x:0:root\nwheel:x:1:root,app\nmany:x:2:other,app\nnone:x:3:\nshort:x\n",
            "app:wheel",
        )
        value = lambda number: cri.Int64Value(value=number)  # noqa: E731

        def who(**fields: Any) -> tuple[str, tuple[int, ...]]:
            found = resolve(cri.LinuxContainerSecurityContext(**fields), accounts)
            return found.user, found.groups

        strict: Any = {"supplemental_groups_policy": cri.Strict, "supplemental_groups": [7, 7]}
        self.assertEqual(who(), ("10:1", (1, 2)))
        self.assertEqual(who(run_as_user=value(10), run_as_group=value(6)), ("10:6", (1, 2)))
        self.assertEqual(who(run_as_username="app", **strict), ("10:11", (7,)))
        self.assertEqual(who(run_as_user=value(0), **strict), ("0:0", (7,)))
        self.assertEqual(who(run_as_username="20", **strict), ("30:31", (7,)), "a name that is a number")
        self.assertEqual(who(run_as_user=value(99), run_as_group=value(6)), ("99:6", ()))
        context: Any = {"run_as_username": "nobody"}
        self.refused("nobody", who, **context)
        for user, words in (("x", "no user 'x'"), ("app:x", "no group 'x'"), (str(2**31), "no user")):
            accounts = Accounts(accounts.passwd, accounts.group, user)
            self.refused(words, who)
        accounts = Accounts()
        self.assertEqual(who(), ("0:0", ()))

    def test_capabilities(self) -> None:
        wanted = cri.Capability(add_capabilities=["net_admin", "CAP_SYS_TIME"], drop_capabilities=["ALL"])
        host = secured(capabilities=wanted)["HostConfig"]
        self.assertEqual((host["CapAdd"], host["CapDrop"]), (["CAP_NET_ADMIN", "CAP_SYS_TIME"], ["ALL"]))
        wanted = cri.Capability(add_capabilities=["ALL", "CHOWN", "KILL"], drop_capabilities=["all", "KILL"])
        host = secured(capabilities=wanted)["HostConfig"]
        self.assertEqual((host["CapAdd"], host["CapDrop"]), (["CAP_CHOWN"], ["ALL", "CAP_KILL"]))
        self.refused("not a capability", secured, capabilities=cri.Capability(add_capabilities=["x y"]))
        self.refused("ambient", secured, capabilities=cri.Capability(add_ambient_capabilities=["CHOWN"]))

    def test_profiles(self) -> None:
        profile = cri.SecurityProfile
        options = lambda **fields: secured(**fields)["HostConfig"]["SecurityOpt"]  # noqa: E731
        self.assertEqual(options(), ["seccomp=unconfined"])
        self.assertEqual(options(seccomp=profile(profile_type=profile.RuntimeDefault), no_new_privs=True),
                         ["no-new-privileges"])  # fmt: skip
        self.assertEqual(options(seccomp=profile(profile_type=profile.Unconfined)), ["seccomp=unconfined"])
        self.assertEqual(options(seccomp_profile_path="unconfined"), ["seccomp=unconfined"])
        default: Any = {"seccomp_profile_path": "runtime/default"}
        self.assertEqual(options(**default), [])
        self.assertEqual(
            options(apparmor=profile(profile_type=profile.Unconfined), **default), ["apparmor=unconfined"]
        )
        self.assertEqual(options(apparmor_profile="runtime/default", **default), [])
        self.refused("seccomp", secured, seccomp_profile_path="somewhere")
        local = profile(profile_type=profile.Localhost, localhost_ref="deny-write\nprofile deny-write {}\n")
        self.assertEqual(options(apparmor=local, **default), ["apparmor=deny-write"])
        local.localhost_ref = "deny-write"
        self.refused("sent no profile", secured, apparmor=local)
        self.refused("sent no profile", secured, apparmor_profile="localhost/x")
        local.localhost_ref = "deny write\nprofile"
        self.refused("not the name of a profile", secured, apparmor=local)

    def test_a_profile_of_the_node_is_checked_again(self) -> None:
        profile = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "syscalls": None}
        self.assertEqual(json.loads(seccomp_profile(json.dumps(profile))), profile)
        for text, words in (
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[]", "not an object"),
            ("{}", "defaultAction"),
            ('{"defaultAction": 1}', "defaultAction"),
            ('{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": ["x"]}', "list of objects"),
            ('{"defaultAction": "SCMP_ACT_NOTIFY"}', "listener"),
            ('{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"action": "SCMP_ACT_NOTIFY"}]}', "listener"),
            ('{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38}', "defaultErrnoRet"),
            ('{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["x"]}', "flags"),
            (f'{{"defaultAction": "{"x" * 300_000}"}}', "bytes"),
        ):
            self.refused(words, lambda text=text: seccomp_profile(text))

    def test_masked_paths_are_the_listed_ones_or_dockers_default(self) -> None:
        self.assertNotIn("MaskedPaths", body()["HostConfig"])
        host = secured(masked_paths=["/proc/kcore"], readonly_paths=["/proc/sys"])["HostConfig"]
        self.assertEqual((host["MaskedPaths"], host["ReadonlyPaths"]), (["/proc/kcore"], ["/proc/sys"]))
        self.assertNotIn("MaskedPaths", secured(privileged=True)["HostConfig"])

    def test_mounts(self) -> None:
        mount = cri.Mount(
            container_path="/d/", host_path="/data", readonly=True,
            propagation=cri.PROPAGATION_HOST_TO_CONTAINER,
        )  # fmt: skip
        first, *rest = body(mounts=[mount])["HostConfig"]["Mounts"]
        self.assertEqual((first["Source"], first["Target"], first["ReadOnly"]), ("/data", "/d", True))
        self.assertEqual(first["BindOptions"], {"Propagation": "rslave"})
        self.assertEqual([one["Target"] for one in rest], ["/etc/hosts", "/etc/resolv.conf"])

    def test_an_image_is_mounted_from_where_it_is(self) -> None:
        found = body(mounts=[cri.Mount(container_path="/x", image=cri.ImageSpec(image=IMAGE))])
        first = found["HostConfig"]["Mounts"][0]
        self.assertEqual((first["Source"], first["Target"]), ("/run/images/x", "/x"))
        self.assertEqual(found["Labels"]["io.infranetes.images"], IMAGE)
        self.assertNotIn("io.infranetes.images", body()["Labels"])

    def test_a_mount_hides_the_sandboxes_own_file(self) -> None:
        mount = cri.Mount(container_path="/etc/hosts", host_path="/data")
        found = body(mounts=[mount])["HostConfig"]["Mounts"]
        self.assertEqual([(one["Target"], one["Source"]) for one in found],
                         [("/etc/hosts", "/data"), ("/etc/resolv.conf", "/vm/resolv.conf")])  # fmt: skip

    def test_unsupported_mounts_name_their_path(self) -> None:
        self.refused("/node/only", body, mounts=[cri.Mount(container_path="/x", host_path="/node/only")])
        for mount in (
            cri.Mount(container_path="relative", host_path="/data"),
            cri.Mount(container_path="/", host_path="/data"),
            cri.Mount(container_path="/a/../..", host_path="/data"),
            cri.Mount(container_path="/x", host_path="data"),
            cri.Mount(container_path="/x", host_path="/data", recursive_read_only=True),
            cri.Mount(container_path="/x", host_path="/data", uidMappings=[cri.IDMapping(length=1)]),
        ):
            self.refused("config.mounts", body, mounts=[mount])

    def test_devices(self) -> None:
        found = body(devices=[cri.Device(host_path="/dev/fuse", permissions="rw")])["HostConfig"]["Devices"]
        wanted = {"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse", "CgroupPermissions": "rw"}
        self.assertEqual(found, [wanted])
        self.refused("/dev/gpu", body, devices=[cri.Device(host_path="/dev/gpu")])
        self.refused("permissions", body, devices=[cri.Device(host_path="/dev/fuse", permissions="rx")])
        self.refused("CDI", body, CDI_devices=[cri.CDIDevice(name="x")])

    def test_limits(self) -> None:
        limits = cri.LinuxContainerResources(
            cpu_shares=512, cpu_quota=50000, cpu_period=100000, memory_limit_in_bytes=1 << 26,
            oom_score_adj=500, cpuset_cpus="0",
        )  # fmt: skip
        host = body(linux=cri.LinuxContainerConfig(resources=limits))["HostConfig"]
        self.assertEqual((host["CpuShares"], host["CpuQuota"], host["CpuPeriod"]), (512, 50000, 100000))
        # No swap unless it is set.
        self.assertEqual((host["Memory"], host["MemorySwap"]), (1 << 26, 1 << 26))
        self.assertEqual((host["OomScoreAdj"], host["CpusetCpus"]), (500, "0"))
        for field, value in (("cpu_shares", -1), ("memory_limit_in_bytes", -2), ("oom_score_adj", 2000)):
            bad: Any = {field: value}
            config = cri.LinuxContainerConfig(resources=cri.LinuxContainerResources(**bad))
            self.refused(field, body, linux=config)

    def test_limits_that_only_the_cgroup_knows(self) -> None:
        limits = cri.LinuxContainerResources(
            hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=4 << 20)],
            unified={"memory.high": "1000"},
        )
        self.assertEqual(cgroup_files(limits), {"hugetlb.2MB.max": str(4 << 20), "memory.high": "1000"})
        for unified in ({"../x": "1"}, {"memory.high": "1\n2"}, {"cgroup.procs": "1"}, {"memory..x": "1"}):
            self.refused("unified", cgroup_files, limits=cri.LinuxContainerResources(unified=unified))
        later = cri.LinuxContainerResources(
            hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=0)], unified={"memory.low": "5"}
        )
        overlay(limits, later)
        expected = {"hugetlb.2MB.max": "0", "memory.high": "1000", "memory.low": "5"}
        self.assertEqual(cgroup_files(limits), expected)
        pages = cri.LinuxContainerResources(hugepage_limits=[cri.HugepageLimit(page_size="../x")])
        self.refused("hugepage", cgroup_files, limits=pages)

    def test_signals(self) -> None:
        self.assertEqual((signal_name(cri.SIGTERM), signal_number(cri.SIGTERM)), ("SIGTERM", 15))
        self.assertEqual(signal_number(cri.SIGRTMINPLUS3), 37)
        self.assertRaises(InvalidArgument, signal_number, 9999)
        for value in cri.Signal.values():
            if value != cri.RUNTIME_DEFAULT:
                self.assertGreater(signal_number(value), 0)
