# SPDX-License-Identifier: Apache-2.0
"""A CRI ContainerConfig becomes an OCI runtime specification, or is refused with the name of its field."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri
from tests.harness.needs import repetitions
from tests.support.hostile.corpus import messages
from tests.vmserver.containers.oci.spec_case import (
    KERNEL,
    SHELL,
    Refusing,
    destinations,
    limited,
    secured,
    spec,
    wanted,
)
from vmserver.containers.accounts import ProcessUser
from vmserver.containers.oci.image import (
    MAX_BYTES,
    MAX_ENTRIES,
    ImageDefaults,
    image_defaults,
    image_volumes,
    stop_signal,
)
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.limits import linux_resources, update_resources
from vmserver.containers.oci.lookup import Lookup, Source, look_up
from vmserver.containers.oci.spec import process_spec
from vmserver.validate import MAX_LAYERS

HOSTILE = settings(max_examples=repetitions(25, 100), deadline=None, suppress_health_check=list(HealthCheck))
IMAGE_FIELDS = ["Entrypoint", "Cmd", "Env", "User", "WorkingDir", "StopSignal", "Labels", "Volumes"]
_TEXT = st.text(st.characters(), max_size=9) | st.sampled_from(
    ["\ud800", "\0", "/", "/\udfff", "A=\ud800", "0:0"]
)
IMAGE_VALUES = st.none() | _TEXT | st.lists(_TEXT, max_size=3) | st.dictionaries(_TEXT, _TEXT, max_size=3)


class ProcessTests(Refusing):
    def test_command_and_args_take_the_place_of_entrypoint_and_cmd(self) -> None:
        image = ImageDefaults(entrypoint=("e",), command=("c",))
        for command, args, expected in (
            ([], [], ["e", "c"]),
            (["a"], [], ["a"]),
            (["a"], ["b"], ["a", "b"]),
            ([], ["b"], ["e", "b"]),
        ):
            found = spec(others={"image": image}, command=command, args=args)
            self.assertEqual(found["process"]["args"], expected)

    def test_an_entrypoint_that_is_an_empty_string_is_none(self) -> None:
        image = ImageDefaults(entrypoint=("",), command=("c",))
        self.assertEqual(spec(others={"image": image})["process"]["args"], ["c"])
        self.assertEqual(spec(others={"image": image}, args=["a"])["process"]["args"], ["a"])
        self.refused("config.command", spec, others={"image": ImageDefaults(entrypoint=("",))})

    def test_without_any_command_it_is_refused(self) -> None:
        self.refused("config.command", spec, others={"image": ImageDefaults()})
        self.refused("config.args", spec, args=["a\0b"])

    def test_the_environment_is_the_images_and_then_its_own(self) -> None:
        image = ImageDefaults(command=("sh",), env=("A=1", "B=2", "PATH=/bin", "=x", "novalue"))
        envs = [cri.KeyValue(key="B", value=b"3=4"), cri.KeyValue(key="C", value=b"\xff")]
        found = spec(others={"image": image}, envs=envs, tty=True)["process"]
        self.assertEqual(
            found["env"],
            [
                "PATH=/bin",
                "HOSTNAME=vm",
                "TERM=xterm",
                "HOME=/",
                "A=1",
                "B=3=4",
                "C=\N{REPLACEMENT CHARACTER}",
            ],
        )
        for key, value in (("", b"x"), ("A=B", b""), ("A\0", b""), ("A", b"\0")):
            self.refused("config.envs", spec, envs=[cri.KeyValue(key=key, value=value)])

    def test_the_home_directory_is_the_users_unless_it_is_set(self) -> None:
        found = Lookup(user=ProcessUser(5, 6, (7,), "/home/u"))
        self.assertIn("HOME=/home/u", spec(others={"lookup": found})["process"]["env"])
        own = spec(others={"lookup": found}, envs=[cri.KeyValue(key="HOME", value=b"/x")])
        self.assertIn("HOME=/x", own["process"]["env"])
        self.assertNotIn("HOME=/home/u", own["process"]["env"])

    def test_the_primary_group_is_among_the_others(self) -> None:
        found = spec(others={"lookup": Lookup(user=ProcessUser(5, 6, (7, 6, 8)))})["process"]["user"]
        self.assertEqual(found, {"uid": 5, "gid": 6, "additionalGids": [6, 7, 8]})

    def test_the_working_directory(self) -> None:
        self.assertEqual(spec()["process"]["cwd"], "/")
        image = ImageDefaults(command=("sh",), working_dir="app")
        self.assertEqual(spec(others={"image": image})["process"]["cwd"], "/app")
        self.assertEqual(spec(others={"image": image}, working_dir="/w")["process"]["cwd"], "/w")
        self.refused("config.working_dir", spec, working_dir="w")

    def test_a_command_in_a_container_is_confined_as_the_container(self) -> None:
        limits = cri.LinuxContainerResources(oom_score_adj=7)
        context = cri.LinuxContainerSecurityContext(no_new_privs=True)
        whole = spec(linux=cri.LinuxContainerConfig(resources=limits, security_context=context))
        process: Any = process_spec(json.loads(json.dumps(whole)), ["ls", "/"], True)
        self.assertEqual((process["args"], process["terminal"]), (["ls", "/"], True))
        self.assertEqual(process["env"], [*whole["process"]["env"], "TERM=xterm"])
        self.assertNotIn("oomScoreAdj", process)
        for same in ("user", "cwd", "capabilities", "rlimits", "noNewPrivileges"):
            self.assertEqual(process[same], whole["process"][same])

    def test_the_stop_signal_is_its_own_or_the_images_or_sigterm(self) -> None:
        own = cri.ContainerConfig(stop_signal=cri.SIGUSR1)
        self.assertEqual(stop_signal(own, ImageDefaults(stop_signal="SIGINT")), signal.SIGUSR1)
        for name, expected in {
            "SIGINT": 2, "quit": 3, "9": 9, "": 15, "SIGNONE": 15, "99999": 15, "SIGRTMIN+3": 37, "0": 15,
            "64": 64, "65": 15, "009": 9, "0009": 15, "SIGRTMAX": 64, "SIGRTMAX+1": 15, "RTMAX-1": 63,
            "SIGHUP": 1, "SIGHUP-1": 15, "\N{SUPERSCRIPT TWO}": 15, "SIGCLD": 17, "POLL": 29, "SIGIOT": 6,
        }.items():  # fmt: skip
            image = ImageDefaults(stop_signal=name)
            self.assertEqual(stop_signal(cri.ContainerConfig(), image), expected, name)


class ImageTests(Refusing):
    def test_a_configuration_is_parsed(self) -> None:
        digest = "sha256:" + "a" * 64
        text = json.dumps(
            {
                "config": {
                    "Entrypoint": ["e"], "Cmd": None, "Env": ["A=1"], "User": "u:g", "WorkingDir": "/w",
                    "StopSignal": "SIGINT", "Labels": {"l": "1"}, "Volumes": {"/v": {}, "/a": {}},
                },
                "rootfs": {"type": "layers", "diff_ids": [digest]},
            }
        )  # fmt: skip
        self.assertEqual(
            image_defaults(text.encode()),
            ImageDefaults(("e",), (), ("A=1",), "u:g", "/w", "SIGINT", {"l": "1"}, ("/a", "/v"), (digest,)),
        )
        self.assertEqual(image_defaults(b"{}"), ImageDefaults())

    def test_what_is_no_configuration_is_refused_by_its_field(self) -> None:
        for text, word in (
            (b"", "not JSON"),
            (b"\xff", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"[]", "not an object"),
            (b'{"config": []}', "config"),
            (b'{"config": {"Env": "A=1"}}', "Env"),
            (b'{"config": {"Cmd": [1]}}', "Cmd"),
            (b'{"config": {"User": "a\\u0000"}}', "User"),
            (b'{"config": {"Labels": {"a": 1}}}', "Labels"),
            (b'{"rootfs": {"diff_ids": ["../x"]}}', "diff_ids"),
            (b'{"config": {"User": "\\ud800"}}', "User"),
            (b'{"config": {"Labels": {"a\\u0000": "1"}}}', "Labels"),
            (b" " * (4 * 1024 * 1024 + 1), "bytes"),
        ):
            self.refused(word, lambda text=text: image_defaults(text))

    def test_as_much_as_is_allowed_is_parsed_and_no_more(self) -> None:
        most, layers = ["x"] * MAX_ENTRIES, ["sha256:" + "a" * 64] * MAX_LAYERS
        labels = {str(number): "" for number in range(MAX_ENTRIES)}
        found = image_defaults(
            json.dumps({"config": {"Env": most, "Labels": labels}, "rootfs": {"diff_ids": layers}}).encode()
        )
        self.assertEqual((len(found.env), len(found.labels)), (MAX_ENTRIES, MAX_ENTRIES))
        self.assertEqual(len(found.diff_ids), MAX_LAYERS)
        self.assertEqual(image_defaults(b"{}" + b" " * (MAX_BYTES - 2)), ImageDefaults())
        for whole, word in (
            ({"config": {"Env": [*most, "x"]}}, "Env"),
            ({"config": {"Labels": {**labels, "x": ""}}}, "Labels"),
            ({"rootfs": {"diff_ids": [*layers, layers[0]]}}, "diff_ids"),
        ):
            self.refused(word, lambda whole=whole: image_defaults(json.dumps(whole).encode()))

    def test_volumes_are_those_of_the_image_where_nothing_else_is_mounted(self) -> None:
        image = ImageDefaults(volumes=("/data/", "/v/../w", "/", "relative", "/taken"))
        config = cri.ContainerConfig(mounts=[cri.Mount(container_path="/taken/", host_path="/x")])
        self.assertEqual(image_volumes(config, image), ["/data", "/w"])


class MountTests(Refusing):
    def test_mounts_come_after_those_that_every_container_has_and_by_their_depth(self) -> None:
        mounts = [cri.Mount(container_path=path, host_path="/x") for path in ("/a/b/c", "/z", "/a/b")]
        found = destinations(spec(mounts=mounts))
        self.assertEqual(found[:2], ["/proc", "/dev"])
        self.assertEqual(found[-3:], ["/z", "/a/b", "/a/b/c"])

    def test_a_mount_hides_what_every_container_has_at_and_below_its_path(self) -> None:
        found = spec(mounts=[cri.Mount(container_path="/dev", host_path="/dev")])
        self.assertEqual(destinations(found), ["/proc", "/sys", "/sys/fs/cgroup", "/dev"])

    def test_the_sandboxes_files_and_the_images_volumes_give_way_to_mounts(self) -> None:
        mount = cri.Mount(container_path="/etc/hosts", host_path="/kubelet/hosts")
        config = cri.ContainerConfig(mounts=[mount])
        found = attrs.evolve(
            wanted(config).lookup, files={"/etc/hosts": "/vm/hosts", "/etc/resolv.conf": "/vm/resolv.conf"}
        )
        volumes = {"/etc/hosts": Path("/no"), "/data": Path("/run/c1/volumes/0")}
        mounts = spec(config, {"lookup": found, "volumes": volumes})["mounts"]
        sources = {mount["destination"]: mount["source"] for mount in mounts if mount["type"] == "bind"}
        self.assertEqual(
            sources,
            {
                "/dev/shm": "/dev/shm",
                "/data": "/run/c1/volumes/0",
                "/etc/hosts": "/kubelet/hosts",
                "/etc/resolv.conf": "/vm/resolv.conf",
            },
        )

    def test_the_sandboxes_files_are_read_only_where_the_root_is(self) -> None:
        """They are one file for all containers of the pod."""
        found = {"lookup": Lookup(files={"/etc/hosts": "/vm/hosts"})}
        for readonly in (False, True):
            mounts = secured(found, readonly_rootfs=readonly)["mounts"]
            (options,) = [mount["options"] for mount in mounts if mount["destination"] == "/etc/hosts"]
            self.assertEqual("ro" in options, readonly, options)

    def options(self, source: Any = None, **fields: Any) -> list[str]:
        config = cri.ContainerConfig(mounts=[cri.Mount(container_path="/m", host_path="/x", **fields)])
        found: Any = spec(config, {"lookup": Lookup(mounts=(source or Source("/x"),))})
        options: list[str] = found["mounts"][-1]["options"]
        return options

    def test_read_only_mounts_and_their_propagation(self) -> None:
        self.assertEqual(self.options(), ["rbind", "rprivate"])
        self.assertEqual(self.options(readonly=True), ["rbind", "rprivate", "ro"])
        recursive = {"readonly": True, "recursive_read_only": True}
        self.assertEqual(self.options(**recursive), ["rbind", "rprivate", "rro"])
        file = Source("/x", directory=False)
        self.assertEqual(self.options(file, **recursive), ["rbind", "rprivate", "ro"])
        image = cri.ImageSpec(image="sha256:x")
        self.assertEqual(self.options(image=image), ["rbind", "rprivate", "ro", "nosuid", "nodev", "noexec"])
        self.refused("config.mounts '/m'", self.options, recursive_read_only=True)
        slave = cri.PROPAGATION_HOST_TO_CONTAINER
        self.refused("config.mounts '/m'", self.options, propagation=slave, **recursive)
        self.refused("config.mounts '/m'", self.options, propagation=17)
        mapping = [cri.IDMapping(length=1)]
        for fields in ({"uidMappings": mapping}, {"gidMappings": mapping}):
            self.refused("id-mapped", self.options, **fields)

    def test_the_roots_propagation_lets_the_mounts_through(self) -> None:
        both, slave = cri.PROPAGATION_BIDIRECTIONAL, cri.PROPAGATION_HOST_TO_CONTAINER
        for kinds, expected in (((), None), ((slave,), "rslave"), ((slave, both), "rshared")):
            mounts = [
                cri.Mount(container_path=f"/{index}", host_path="/x", propagation=kind)
                for index, kind in enumerate(kinds)
            ]
            self.assertEqual(spec(mounts=mounts)["linux"].get("rootfsPropagation"), expected)

    def test_two_mounts_at_one_path_are_refused(self) -> None:
        mounts = [cri.Mount(container_path=path, host_path="/x") for path in ("/a", "/a/")]
        self.refused("another mount", spec, mounts=mounts)

    def test_shared_memory_is_the_pods_or_its_own(self) -> None:
        def shm(ipc: Any) -> Any:
            found = secured(namespace_options=cri.NamespaceOption(ipc=ipc))
            return next(mount for mount in found["mounts"] if mount["destination"] == "/dev/shm")

        self.assertEqual((shm(cri.POD)["type"], shm(cri.POD)["source"]), ("bind", "/dev/shm"))
        self.assertEqual((shm(cri.CONTAINER)["type"], shm(cri.CONTAINER)["source"]), ("tmpfs", "shm"))
        self.assertIn("size=65536k", shm(cri.CONTAINER)["options"])


class NamespaceTests(Refusing):
    def types(self, **fields: Any) -> dict[str, str]:
        found = secured({"target_pid": 42, "init_pid": 7}, namespace_options=cri.NamespaceOption(**fields))
        return {each["type"]: each.get("path", "") for each in found["linux"]["namespaces"]}

    def test_those_of_the_vm_are_the_pods(self) -> None:
        self.assertEqual(self.types(), {"mount": "", "cgroup": "", "pid": "/proc/7/ns/pid"})
        nodes = self.types(pid=cri.NODE, ipc=cri.NODE, network=cri.NODE)
        self.assertEqual(nodes, {"mount": "", "cgroup": ""})

    def test_processes_and_ipc_of_its_own(self) -> None:
        self.assertEqual(set(self.types(pid=cri.CONTAINER)), {"mount", "cgroup", "pid"})
        self.assertEqual(set(self.types(ipc=cri.CONTAINER)), {"mount", "cgroup", "ipc", "pid"})

    def test_an_ipc_namespace_of_its_own_has_the_pods_sysctls(self) -> None:
        sysctls = {"kernel.shmmax": "1", "net.core.somaxconn": "2"}
        sandbox = cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(sysctls=sysctls))
        options = cri.NamespaceOption(ipc=cri.CONTAINER)
        found = secured({"sandbox_config": sandbox}, namespace_options=options)
        self.assertEqual(found["linux"]["sysctl"], {"kernel.shmmax": "1"})
        self.assertNotIn("sysctl", secured({"sandbox_config": sandbox})["linux"])

    def test_the_processes_of_another_container(self) -> None:
        self.assertEqual(self.types(pid=cri.TARGET, target_id="c0")["pid"], "/proc/42/ns/pid")
        self.refused("target_id", self.types, pid=cri.TARGET)
        target = cri.NamespaceOption(pid=cri.TARGET, target_id="c0")
        with self.assertRaises(FailedPrecondition) as caught:
            secured(namespace_options=target)
        self.assertIn("c0 does not run", str(caught.exception))

    def test_cgroup_v1_has_no_namespace_of_its_own(self) -> None:
        found = spec(others={"kernel": Kernel(cgroup2=False)})["linux"]["namespaces"]
        self.assertEqual([each["type"] for each in found], ["mount", "pid"])

    def test_what_is_not_supported_is_refused(self) -> None:
        self.refused("namespace_options.network", self.types, network=cri.CONTAINER)
        self.refused("namespace_options.ipc", self.types, ipc=cri.TARGET)
        self.refused("namespace_options.pid", self.types, pid=9)
        users = cri.UserNamespace(mode=cri.POD, uids=[cri.IDMapping(length=1)])
        self.refused("userns_options.gids", self.types, userns_options=users)
        self.assertEqual(self.types(userns_options=cri.UserNamespace(mode=cri.NODE)), self.types())


class LimitTests(Refusing):
    def test_limits(self) -> None:
        found = limited(
            cpu_period=50_000, cpu_quota=25_000, cpu_shares=512, memory_limit_in_bytes=2**20,
            cpuset_cpus="0-1,3", cpuset_mems="0", unified={"memory.oom.group": "1"},
            hugepage_limits=[
                cri.HugepageLimit(page_size="2MB", limit=4), cri.HugepageLimit(page_size="1GB", limit=4)
            ],
        )  # fmt: skip
        self.assertEqual(
            found,
            {
                "memory": {"limit": 2**20, "swap": 2**20},
                "cpu": {"shares": 512, "quota": 25_000, "period": 50_000, "cpus": "0-1,3", "mems": "0"},
                "hugepageLimits": [{"pageSize": "2MB", "limit": 4}],
                "unified": {"memory.oom.group": "1"},
            },
        )
        self.assertEqual(limited(), {})

    def test_no_quota_and_swap(self) -> None:
        self.assertEqual(limited(cpu_quota=-5)["cpu"], {"quota": -1, "period": 100_000})
        self.assertEqual(limited(memory_swap_limit_in_bytes=-1)["memory"], {"swap": -1})
        both = limited(memory_limit_in_bytes=5, memory_swap_limit_in_bytes=9)
        self.assertEqual(both["memory"], {"limit": 5, "swap": 9})
        self.assertEqual(limited(cpu_shares=10**9)["cpu"], {"shares": 262_144})

    def test_what_can_not_be_set_is_refused_by_its_field(self) -> None:
        for field, value in {
            "cpu_period": 999, "cpu_quota": 999, "cpu_shares": -1, "memory_limit_in_bytes": -2,
            "memory_swap_limit_in_bytes": 5, "oom_score_adj": 1001, "cpuset_cpus": "0;1",
            "cpuset_mems": "a", "unified": {"../x": "1"}, "hugepage_limits": [cri.HugepageLimit()],
        }.items():  # fmt: skip
            self.refused(f"resources.{field}", limited, **{field: value})
        less = {"memory_limit_in_bytes": 9, "memory_swap_limit_in_bytes": 5}
        self.refused("resources.memory_swap_limit_in_bytes", limited, **less)
        for field, value in {
            "cpu_period": 1_000_001, "oom_score_adj": -1001, "cpuset_mems": "0," * 2048 + "00",
        }.items():  # fmt: skip
            self.refused(f"resources.{field}", limited, **{field: value})
        old = Kernel(cgroup2=False)
        limits = cri.LinuxContainerResources(unified={"pids.max": "1"})
        self.refused("resources.unified: pids.max", lambda: linux_resources(limits, old))

    def test_what_kubelet_adds_where_its_node_has_cgroup_2_refuses_no_vm_without(self) -> None:
        added = {"memory.oom.group": "1", "memory.swap.max": "0", "memory.min": "4096", "memory.high": "max"}
        limits = cri.LinuxContainerResources(cpu_shares=512, unified=added)
        self.assertEqual(linux_resources(limits, Kernel(cgroup2=False)), {"cpu": {"shares": 512}})
        self.assertEqual(linux_resources(limits, Kernel())["unified"], added)

    def test_the_least_and_the_most_that_can_be_set(self) -> None:
        for field, value, name in (
            ("cpu_period", 1000, "period"),
            ("cpu_period", 1_000_000, "period"),
            ("cpu_quota", 1000, "quota"),
            ("cpu_shares", 2, "shares"),
            ("cpu_shares", 262_144, "shares"),
            ("cpuset_cpus", "0," * 2047 + "00", "cpus"),
        ):
            self.assertEqual(limited(**{field: value})["cpu"][name], value)
        self.assertEqual(limited(cpu_shares=1)["cpu"], {"shares": 2})
        same = limited(memory_limit_in_bytes=5, memory_swap_limit_in_bytes=5)
        self.assertEqual(same["memory"], {"limit": 5, "swap": 5})

    def test_a_change_keeps_the_other_limits(self) -> None:
        before = cri.LinuxContainerResources(cpu_quota=5000, cpu_period=20_000, memory_limit_in_bytes=10**6)
        changes = cri.LinuxContainerResources(cpu_quota=-1, memory_limit_in_bytes=10**7)
        self.assertEqual(
            update_resources(before, changes, KERNEL),
            {"memory": {"limit": 10**7, "swap": 10**7}, "cpu": {"quota": -1, "period": 20_000}},
        )

    def test_cgroup_v1_has_no_quota_that_is_none(self) -> None:
        old, none = Kernel(cgroup2=False), cri.LinuxContainerResources(cpu_quota=-1)
        self.assertEqual(linux_resources(none, old)["cpu"], {"period": 100_000})
        before = cri.LinuxContainerResources(cpu_quota=5000)
        self.refused("resources.cpu_quota", lambda: update_resources(before, none, old))
        update_resources(none, none, old)  # there is no quota to take away
        self.assertIn("cpu", update_resources(before, cri.LinuxContainerResources(), old))

    def test_less_memory_than_is_in_use_is_refused(self) -> None:
        changes = cri.LinuxContainerResources(memory_limit_in_bytes=10**6)
        none = cri.LinuxContainerResources()
        self.refused(
            "memory_limit_in_bytes", lambda: update_resources(none, changes, KERNEL, memory_in_use=10**7)
        )
        self.assertIn("memory", update_resources(none, changes, KERNEL, memory_in_use=10**6))
        update_resources(none, none, KERNEL, memory_in_use=10**6)


class HostileTests(SynchronousTestCase):
    """Whatever can't be had is refused by its name, and the rest is valid JSON."""

    def check(self, config: Any, image: ImageDefaults = SHELL, pid: int = 42) -> None:
        try:
            found = look_up(config, image, Path("/nonexistent"), {}, dict.fromkeys(range(400), "/tmp"))
            whole = spec(config, {"target_pid": pid, "image": image, "lookup": found})
        except (InvalidArgument, FailedPrecondition) as error:
            self.assertRegex(str(error), r"(config|security_context|namespace_options|resources)[.:]")
            self.assertLess(len(str(error)), 700)
            return
        text = json.dumps(whole)
        self.assertEqual(json.loads(text), whole)
        self.assertNotIn("\\u0000", text)
        text.encode()

    @HOSTILE
    @given(messages(cri.ContainerConfig.DESCRIPTOR), st.sampled_from([0, 42]))
    def test_any_configuration(self, config: Any, pid: int) -> None:
        self.check(config, pid=pid)

    @HOSTILE
    @given(messages(cri.LinuxContainerSecurityContext.DESCRIPTOR))
    def test_any_security_context(self, context: Any) -> None:
        context.ClearField("namespace_options")
        self.check(cri.ContainerConfig(linux=cri.LinuxContainerConfig(security_context=context)))

    @HOSTILE
    @given(messages(cri.LinuxContainerResources.DESCRIPTOR))
    def test_any_limits(self, limits: Any) -> None:
        self.check(cri.ContainerConfig(linux=cri.LinuxContainerConfig(resources=limits)))
        with contextlib.suppress(InvalidArgument):
            update_resources(limits, limits, KERNEL)

    @HOSTILE
    @given(messages(cri.Mount.DESCRIPTOR), st.sampled_from(["/m", "/proc/x", "/dev", "/a/../b", ""]))
    def test_any_mount(self, mount: Any, path: str) -> None:
        mount.container_path = path or mount.container_path
        mount.host_path = "/tmp" if path else mount.host_path
        self.check(cri.ContainerConfig(mounts=[mount]))

    @HOSTILE
    @given(st.dictionaries(st.sampled_from(IMAGE_FIELDS), IMAGE_VALUES))
    def test_any_image(self, fields: Any) -> None:
        try:
            image = image_defaults(json.dumps({"config": fields}).encode())
        except InvalidArgument as error:
            self.assertIn("image", str(error))
            return
        self.check(cri.ContainerConfig(), image)
        stop_signal(cri.ContainerConfig(), image)
