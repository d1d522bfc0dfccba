# SPDX-License-Identifier: Apache-2.0
"""One pod through the CRI, as a kubelet would ask for it."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.error import ConnectError, ConnectionLost
from twisted.internet.task import deferLater
from twisted.web.client import Agent, ResponseFailed, readBody

from demo.daemon import no_answer
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageStub, RuntimeStub

LABELS = {"app.kubernetes.io/name": "infranetes-demo"}
CALL_SECONDS = 60.0
POD_SECONDS = 240.0  # kubelet's own patience with RunPodSandbox
WEB_PORT = 8080
NO_ANSWER = (ConnectError, ConnectionLost, ResponseFailed)


@attrs.frozen
class LogLine:
    """A line of a CRI log file. :ivar partial: it goes on with the stream's next line."""

    time: str
    stream: str
    partial: bool
    text: str

    @classmethod
    def parse(cls, line: str) -> LogLine:
        """:raise ValueError: not `<time> <stream> <P|F> <text>`."""
        moment, stream, tag, *rest = line.split(" ", 3)
        if tag not in ("P", "F"):
            raise ValueError(f"not a line of a CRI log: {line!r}")
        return cls(moment, stream, tag == "P", rest[0] if rest else "")


@attrs.define
class Pod:
    """One sandbox and its containers."""

    reactor: IReactor
    runtime: RuntimeStub
    images: ImageStub
    logs: Path
    handler: str = ""
    id: str = ""
    ip: str = ""
    _containers: dict[str, str] = attrs.field(factory=dict)
    _config: cri.PodSandboxConfig = attrs.field(factory=cri.PodSandboxConfig)

    def _sandbox(self) -> cri.PodSandboxConfig:
        uid = secrets.token_hex(8)
        metadata = cri.PodSandboxMetadata(name="demo", uid=uid, namespace="default", attempt=0)
        return cri.PodSandboxConfig(
            metadata=metadata, hostname="demo", log_directory=str(self.logs / uid), labels=LABELS
        )

    async def run(self) -> None:
        """Run the sandbox, which sets `id` and `ip`."""
        self._config = self._sandbox()
        self.id = await self._run(POD_SECONDS)
        self.ip = (await self.status()).status.network.ip

    async def _run(self, within: float) -> str:
        request = cri.RunPodSandboxRequest(config=self._config, runtime_handler=self.handler)
        return str((await self.runtime.RunPodSandbox(request, timeout=within)).pod_sandbox_id)

    async def find_if_begun(self) -> None:
        """Set `id` if `run` was interrupted, for the daemon goes on with it: the same call again joins in."""
        if self._config.metadata.uid and not self.id:
            self.id = await self._run(CALL_SECONDS)

    async def status(self) -> cri.PodSandboxStatusResponse:
        """Call PodSandboxStatus, verbose."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=self.id, verbose=True)
        response: cri.PodSandboxStatusResponse = await self.runtime.PodSandboxStatus(
            request, timeout=CALL_SECONDS
        )
        return response

    async def vm(self) -> str:
        """The token in the VM's name, by which its process is found."""
        found = json.loads((await self.status()).info["info"])
        return str(found["vm"]["id"]).rpartition("-")[2]

    async def start(self, name: str, image: str, command: Sequence[str]) -> None:
        """Create and start one container."""
        config = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name=name, attempt=0),
            image=cri.ImageSpec(image=image),
            command=command,
            log_path=f"{name}/0.log",
            labels=LABELS,
        )
        create = cri.CreateContainerRequest(
            pod_sandbox_id=self.id, config=config, sandbox_config=self._config
        )
        made = await self.runtime.CreateContainer(create, timeout=CALL_SECONDS * 2)
        self._containers[name] = made.container_id
        await self.runtime.StartContainer(
            cri.StartContainerRequest(container_id=made.container_id), timeout=CALL_SECONDS
        )

    async def container(self, name: str) -> cri.ContainerStatus:
        """A container's status."""
        request = cri.ContainerStatusRequest(container_id=self._containers[name])
        response: cri.ContainerStatusResponse = await self.runtime.ContainerStatus(
            request, timeout=CALL_SECONDS
        )
        return response.status

    async def ended(self, name: str, within: float) -> cri.ContainerStatus:
        """A container's status once it has ended, or as it is after `within` seconds."""
        until = time.monotonic() + within
        while True:
            status = await self.container(name)
            if status.state == cri.CONTAINER_EXITED or time.monotonic() > until:
                return status
            await deferLater(self.reactor, 0.1)

    async def execute(self, name: str, command: Sequence[str]) -> cri.ExecSyncResponse:
        """Run a command in a container."""
        request = cri.ExecSyncRequest(container_id=self._containers[name], cmd=command, timeout=20)
        response: cri.ExecSyncResponse = await self.runtime.ExecSync(request, timeout=CALL_SECONDS)
        return response

    async def log(self, name: str, within: float, complete: bool) -> list[LogLine]:
        """Read a container's log on the node, once it has a line.

        :param complete: whether the container has ended, before which the log has all of its lines.
        """
        path = self.logs / self._config.metadata.uid / name / "0.log"
        until = time.monotonic() + within
        while True:
            text = path.read_text(errors="replace") if path.exists() else ""
            if text or complete or time.monotonic() > until:
                break
            await deferLater(self.reactor, 0.1)
        return [LogLine.parse(line) for line in text.splitlines()]

    async def page(self, within: float = 2.0) -> str:
        """Fetch the page of the web server in the pod; "": nothing answers within that many seconds."""
        agent = Agent(self.reactor, connectTimeout=within)
        try:
            response = await agent.request(b"GET", f"http://{self.ip}:{WEB_PORT}/".encode())
            return bytes(await readBody(response)).decode(errors="replace").strip()
        except NO_ANSWER as error:
            if isinstance(error, ResponseFailed) and any(
                each.check(CancelledError) for each in error.reasons
            ):
                raise
            return ""

    async def fetch(self, page: str, within: float) -> None:
        """Wait until the pod's web server answers with this page.

        :raise RuntimeError: it does not within that many seconds.
        """
        until = time.monotonic() + within
        while (found := await self.page()) != page:
            if time.monotonic() > until:
                raise RuntimeError(f"at {self.ip}:{WEB_PORT} there is no {page!r} but {found[:200]!r}")
            await deferLater(self.reactor, 0.1)

    async def end(self) -> None:
        """Stop and remove the sandbox."""
        await end(self.runtime, self.id)

    async def known(self) -> bool:
        """Whether the daemon lists the sandbox."""
        listed = await self.runtime.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=CALL_SECONDS)
        return any(item.id == self.id for item in listed.items)


async def end(runtime: RuntimeStub, sandbox: str) -> None:
    """Stop and remove a sandbox."""
    seconds = CALL_SECONDS * 2
    await runtime.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=sandbox), timeout=seconds)
    await runtime.RemovePodSandbox(cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox), timeout=seconds)


async def remove_all(runtime: RuntimeStub) -> int:
    """End the pods that an earlier demo left, if the daemon is ready. Returns how many."""
    request = cri.ListPodSandboxRequest(filter=cri.PodSandboxFilter(label_selector=LABELS))
    listed = cri.ListPodSandboxResponse()
    with no_answer():
        listed = await runtime.ListPodSandbox(request, timeout=CALL_SECONDS)
    for item in listed.items:
        await end(runtime, item.id)
    return len(listed.items)


def processes_naming(word: str) -> list[int]:
    """The processes of this machine with `word` in their command line."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found
