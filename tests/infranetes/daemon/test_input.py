# SPDX-License-Identifier: Apache-2.0
"""Bad input through the socket: the error names what is wrong, and nothing is left behind."""

from __future__ import annotations

from typing import Any

from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code

UNKNOWN = "f" * 32


@needs_registry
class InputTests(DaemonCase):
    """After each of these calls the daemon serves as before."""

    async def setUp(self) -> None:
        super().setUp()
        await self.start()

    async def refused_run(self, code: Code, words: str, config: Any = None, handler: str = "") -> None:
        request = cri.RunPodSandboxRequest(runtime_handler=handler)
        if config is not None:
            request.config.CopyFrom(config)
        message = await self.refused(code, self.runtime.RunPodSandbox(request, timeout=20.0))
        self.assertIn(words, message)

    async def refused_create(self, code: Code, words: str, sandbox: str, config: Any = None) -> None:
        request = cri.CreateContainerRequest(pod_sandbox_id=sandbox)
        if config is not None:
            request.config.CopyFrom(config)
        message = await self.refused(code, self.runtime.CreateContainer(request, timeout=20.0))
        self.assertIn(words, message)

    async def nothing_is_there(self) -> None:
        self.assertEqual(await self.vms(), [])
        self.assertEqual(await self.sandboxes(), [])
        self.assertEqual(await self.containers(), [])

    async def test_what_nothing_runs_containers_by(self) -> None:
        name = "infranetes.io/containers"
        unknown = self.pod(annotations={name: "podman"})
        await self.refused_run(
            Code.INVALID_ARGUMENT, f"annotation {name}: 'podman': expected docker", unknown
        )
        absent = self.pod(annotations={name: "docker"})
        words = "docker can't run containers in this VM: it offers fake"
        await self.refused_run(Code.FAILED_PRECONDITION, words, absent)
        await self.nothing_is_there()

    async def test_sandboxes_that_can_not_be_had(self) -> None:
        bad = Code.INVALID_ARGUMENT
        await self.refused_run(bad, "config is missing")
        await self.refused_run(bad, "config.metadata", cri.PodSandboxConfig())
        for field in ("name", "namespace", "uid"):
            config = self.pod()
            setattr(config.metadata, field, "")
            await self.refused_run(bad, f"config.metadata.{field}", config)
            setattr(config.metadata, field, "x" * 1000)
            await self.refused_run(bad, f"config.metadata.{field}", config)
            setattr(config.metadata, field, "a\nb")
            await self.refused_run(bad, f"config.metadata.{field}", config)
        await self.refused_run(bad, "config.hostname", self.pod(hostname="no_such host"))
        await self.refused_run(bad, "config.hostname", self.pod(hostname="a..b"))
        for directory in ("relative", "/var/../../etc", "/a\0b"):
            config = self.pod()
            config.log_directory = directory
            await self.refused_run(bad, "config.log_directory", config)
        await self.refused_run(bad, "runtime_handler 'runc'", self.pod(), handler="runc")
        for field, value in (("host_port", 65536), ("host_ip", "here"), ("protocol", 7)):
            mapping = cri.PortMapping(container_port=80, host_port=8080)
            setattr(mapping, field, value)
            await self.refused_run(bad, f"port_mappings[0].{field}", self.pod(port_mappings=[mapping]))
        options = cri.NamespaceOption(userns_options=cri.UserNamespace(mode=cri.POD))
        context = cri.LinuxSandboxSecurityContext(namespace_options=options)
        config = self.pod(linux=cri.LinuxPodSandboxConfig(security_context=context))
        await self.refused_run(bad, "namespace_options.userns_options", config)
        annotations = {"a": "x" * (2 * 1024 * 1024)}
        await self.refused_run(bad, "bytes", self.pod(annotations=annotations))
        await self.nothing_is_there()
        await self.run_pod()

    async def test_containers_that_can_not_be_had(self) -> None:
        bad = Code.INVALID_ARGUMENT
        sandbox = await self.run_pod()
        await self.refused_create(bad, "pod_sandbox_id", "", self.box())
        await self.refused_create(Code.NOT_FOUND, UNKNOWN, UNKNOWN, self.box())
        await self.refused_create(bad, "config is missing", sandbox)
        await self.refused_create(bad, "config.metadata", sandbox, cri.ContainerConfig())
        await self.refused_create(bad, "config.metadata.name", sandbox, self.box(""))
        await self.refused_create(bad, "config.image", sandbox, self.box(image=cri.ImageSpec()))
        missing = self.box(image=cri.ImageSpec(image="registry.invalid/none:1"))
        await self.refused_create(Code.NOT_FOUND, "registry.invalid/none", sandbox, missing)
        malformed = self.box(image=cri.ImageSpec(image="UPPER CASE//"))
        await self.refused_create(bad, "UPPER CASE", sandbox, malformed)
        for path in ("/etc/passwd", "../../etc/passwd", "a/../../b", "x\0y", "dir/"):
            config = self.box()
            config.log_path = path
            await self.refused_create(bad, "config.log_path", sandbox, config)
        for key, value, words in (
            ("", b"x", "config.envs[0].key"),
            ("A=B", b"x", "config.envs[0].key"),
            ("A", b"x\0y", "zero byte"),
        ):
            config = self.box(envs=[cri.KeyValue(key=key, value=value)])
            await self.refused_create(bad, words, sandbox, config)
        mount = cri.Mount(container_path="/data", host_path="/dev/null")
        await self.refused_create(bad, "/dev/null at /data", sandbox, self.box(mounts=[mount]))
        device = cri.Device(host_path="../dev/kvm", container_path="/dev/kvm", permissions="rw")
        await self.refused_create(bad, "config.devices[0].host_path", sandbox, self.box(devices=[device]))
        named = cri.CDIDevice(name="vendor.com/class=one")
        await self.refused_create(bad, "vendor.com/class=one", sandbox, self.box(CDI_devices=[named]))
        self.assertEqual(await self.containers(), [])
        await self.create(sandbox)

    async def test_ids_that_nothing_has(self) -> None:
        missing = Code.NOT_FOUND
        for id in (UNKNOWN, "x" * 100_000, "../../etc", "\u2603"):
            for call in (
                self.runtime.PodSandboxStatus(cri.PodSandboxStatusRequest(pod_sandbox_id=id), timeout=5.0),
                self.runtime.StartContainer(cri.StartContainerRequest(container_id=id), timeout=5.0),
                self.runtime.ContainerStatus(cri.ContainerStatusRequest(container_id=id), timeout=5.0),
                self.runtime.ReopenContainerLog(cri.ReopenContainerLogRequest(container_id=id), timeout=5.0),
                self.runtime.ExecSync(cri.ExecSyncRequest(container_id=id, cmd=["ls"]), timeout=5.0),
                self.runtime.UpdateContainerResources(
                    cri.UpdateContainerResourcesRequest(
                        container_id=id, linux=cri.LinuxContainerResources(cpu_shares=2)
                    ),
                    timeout=5.0,
                ),
            ):
                message = await self.refused(missing, call)
                self.assertIn(id[:64], message)
                self.assertLess(len(message), 200)
            await self.stop_pod(id)
            await self.remove_pod(id)
            await self.runtime.StopContainer(cri.StopContainerRequest(container_id=id), timeout=5.0)
            await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=id), timeout=5.0)

    async def test_ids_that_are_empty_or_of_several(self) -> None:
        bad = Code.INVALID_ARGUMENT
        found: dict[str, str] = {}
        while len({id[0] for id in found.values()}) == len(found):
            name = f"p{len(found)}"
            found[name] = await self.run_pod(name)
        first = list(found.values())[-1][0]
        for id in ("", first):
            await self.refused(
                bad,
                self.runtime.PodSandboxStatus(cri.PodSandboxStatusRequest(pod_sandbox_id=id), timeout=5.0),
            )
            await self.refused(bad, self.stop_pod(id))
            await self.refused(bad, self.remove_pod(id))
        await self.refused(
            bad, self.runtime.ContainerStatus(cri.ContainerStatusRequest(container_id=""), timeout=5.0)
        )
        self.assertEqual(len(await self.sandboxes()), len(found))

    async def test_calls_that_make_no_sense(self) -> None:
        bad, wrong_state = Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION
        sandbox = await self.run_pod()
        container = await self.create(sandbox)
        run = self.runtime
        command = cri.ExecSyncRequest(container_id=container, cmd=["ls"])
        await self.refused(wrong_state, run.ExecSync(command, timeout=5.0))
        await self.refused(bad, run.ExecSync(cri.ExecSyncRequest(container_id=container), timeout=5.0))
        for timeout, code in ((-1, bad), (2**40, wrong_state)):  # any time is long enough
            exec_ = cri.ExecSyncRequest(container_id=container, cmd=["ls"], timeout=timeout)
            await self.refused(code, run.ExecSync(exec_, timeout=5.0))
        reopen = cri.ReopenContainerLogRequest(container_id=container)
        await self.refused(wrong_state, run.ReopenContainerLog(reopen, timeout=5.0))
        update = cri.UpdateContainerResourcesRequest(container_id=container)
        await self.refused(bad, run.UpdateContainerResources(update, timeout=5.0))
        await self.refused(Code.ALREADY_EXISTS, self.create(sandbox))
        await self.stop_pod(sandbox)
        start = cri.StartContainerRequest(container_id=container)
        await self.refused(wrong_state, run.StartContainer(start, timeout=5.0))
        await self.refused(wrong_state, self.create(sandbox, self.box("late")))

    async def test_secrets_are_not_logged(self) -> None:
        """Not even at the most verbose level."""
        auth = cri.AuthConfig(username="me", password="hunter2-secret", auth="c2VjcmV0", server_address="r")
        request = cri.PullImageRequest(image=cri.ImageSpec(image="127.0.0.1:1/x:1"), auth=auth)
        await self.refused(Code.UNAVAILABLE, self.image_service.PullImage(request, timeout=60.0))
        sandbox = await self.run_pod()
        envs = [cri.KeyValue(key="TOKEN", value=b"environment-secret")]
        container = await self.run_container(sandbox, self.box(script="sleep 100", envs=envs))
        command = cri.ExecSyncRequest(container_id=container, cmd=["echo", "command-secret"], timeout=5)
        await self.runtime.ExecSync(command, timeout=10.0)
        for secret in ("hunter2", "c2VjcmV0", "environment-secret", "command-secret", "PRIVATE KEY"):
            self.assertNotIn(secret, self.log)
