# SPDX-License-Identifier: Apache-2.0
"""Volumes as a container of a real Docker engine sees them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from infranetes_common.filesync.manifest import DIRECTORY, FILE, SYMLINK, Change, Entry, Removed
from infranetes_common.filesync.wire import PREFIX, change_to_wire
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_docker
from tests.support.dockerd import shared
from tests.vmserver.harness import Agent
from tests.vmserver.rpc.test_agent import ID, AgentCase
from vmserver.containers.docker.provider import DockerConfig, DockerProvider

reactor = installed()


@needs_docker
class DockerVolumeTests(AgentCase):
    timeout = 180

    async def setUp(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        config = DockerConfig(socket=shared().socket)
        agent = Agent(
            reactor,
            directory,
            provider=lambda: DockerProvider(reactor, config, directory / "etc", directory / "run"),
        )
        await self.begin(agent)
        await self.load()

    async def put(self, id: str, *changes: Change, file: bool = False) -> None:
        def requests() -> Any:
            bounds = messages.VolumeBounds(entries=100, bytes=100_000)
            yield messages.PutVolumeRequest(header=messages.VolumeHeader(id=id, file=file, bounds=bounds))
            for change in changes:
                yield messages.PutVolumeRequest(change=change_to_wire(change))

        await self.stub.PutVolume(requests(), timeout=20.0)

    async def sh(self, script: str) -> str:
        request = messages.ExecSyncRequest(id=ID, command=["sh", "-c", script])
        ran = await self.stub.ExecSync(request, timeout=30.0)
        return str((ran.stdout + ran.stderr).decode())

    def version(self, name: bytes, old: bytes = b"") -> list[Change]:
        """Send what kubelet has written, as the node does."""
        return [
            Entry(b".." + name, DIRECTORY, 0o755, 0, 0),
            Entry(b".." + name + b"/key", FILE, 0o644, 0, 0, len(name), time.time_ns()),
            name,
            Entry(b"..data", SYMLINK, 0o777, 0, 0, target=b".." + name),
            Entry(b"key", SYMLINK, 0o777, 0, 0, target=b"..data/key"),
            *([Removed(b".." + old + b"/key"), Removed(b".." + old)] if old else []),
        ]

    async def test_files_and_directories_in_a_container(self) -> None:
        await self.put("config", *self.version(b"first"))
        await self.put("message", Entry(b"", FILE, 0o666, 0, 0), file=True)
        await self.put("shared", Entry(b"", DIRECTORY, 0o777, 1000, 1000))
        mounts = [
            cri.Mount(container_path="/config", host_path=PREFIX + "config", readonly=True),
            cri.Mount(container_path="/dev/termination-log", host_path=PREFIX + "message"),
            cri.Mount(container_path="/shared", host_path=PREFIX + "shared"),
        ]
        config = cri.ContainerConfig(command=["sleep", "1000"], mounts=mounts)
        request = messages.CreateContainerRequest(id=ID, image_id=self.image.id, config=config)
        await self.stub.CreateContainer(request, timeout=60.0)
        await self.stub.StartContainer(messages.StartContainerRequest(id=ID), timeout=60.0)

        self.assertEqual(await self.sh("cat /config/key; ls -a /config | wc -l"), "first5\n")
        self.assertIn("Read-only", await self.sh("echo x > /config/key"))
        self.assertIn("Read-only", await self.sh("touch /config/new"))
        await self.put("config", *self.version(b"second", b"first"))
        self.assertEqual(await self.sh("cat /config/key; ls -a /config | wc -l"), "second5\n")

        await self.sh("echo bye > /dev/termination-log; echo data > /shared/data; chown 7 /shared/data")
        disk = self.agent.config.volumes_dir
        self.assertEqual((disk / "message" / "file").read_text(), "bye\n")
        self.assertEqual((disk / "shared" / "directory" / "data").stat().st_uid, 7)
        await self.put("message", Entry(b"", FILE, 0o666, 0, 0, 3), b"new", file=True)
        self.assertEqual(await self.sh("cat /dev/termination-log"), "new")
        self.assertEqual(await self.sh("stat -c '%a %u' /shared"), "777 1000\n")
