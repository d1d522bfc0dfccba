# SPDX-License-Identifier: Apache-2.0
"""Volumes of a pod whose image is the VM itself: its units wait for them, also when the VM reboots by itself.

Normally a QEMU VM that reboots has ended. Here QEMU lets it reboot, as clouds do. A `run_dir` that outlives a
reboot stands for a cloud's user data, from which the agent gets its identity again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.trial.unittest import TestCase

from infranetes.guest import image as images
from infranetes.guest.image import GuestImage
from infranetes.machines.agent.client import AgentClient
from infranetes.providers.interface import Instance
from infranetes.providers.qemu import QemuProvider
from infranetes_common.errors import InfranetesError
from infranetes_common.filesync.manifest import Bounds, Change, ordered
from infranetes_common.filesync.scan import read, scan
from infranetes_common.filesync.tree import Tree
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.wire import cri
from tests.contract.pod_provider_case import reactor
from tests.e2e.qemu_case import IMAGES, QemuCase
from tests.harness.durations import slow
from txgrpc import Channel

_REBOOT_SECONDS = 400.0  # without KVM, on a machine that is busy with other work
_ID, _SECRET = "c" * 32, "5" * 32  # the ids of the container and of the secret's volume
_AGENT = 'provider = "machine"\nrun_dir = "/var/lib/vmserver/run"\n'
_UNIT = """\
[Unit]
Description=Note each boot on the volume
StartLimitIntervalSec=0

[Service]
ExecStartPre=mountpoint -q /data
ExecStart=sh -c 'cat /proc/sys/kernel/random/boot_id >>/data/boots && sync && exec sleep infinity'
Restart=on-failure
RestartSec=3

[Install]
WantedBy=multi-user.target
"""
_BOUNDS = Bounds(16, 4096)
_SECONDS = 120.0
_KERNEL = "root=/dev/vda rw console=ttyS0 quiet fsck.mode=skip net.ifnames=0 panic=-1"


@contextmanager
def mounted(disk: Path, at: Path) -> Iterator[Path]:
    """Mount an image's file system at a path."""
    at.mkdir()
    subprocess.run(["mount", "-o", "loop", disk, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


@slow(250, "its VMs are emulated where there is no KVM")
class VmImageVolumeTests(QemuCase, TestCase):
    def setUp(self) -> Any:
        begun = super().setUp()
        self.open_dir.chmod(0o755)
        image = self.machine_image()
        volumes = self.state_dir / "volumes"
        volumes.mkdir(mode=0o700)
        (volumes / "pvc-1.raw").touch(mode=0o600)
        os.truncate(volumes / "pvc-1.raw", 64 << 20)
        self.settings.update(
            image_dir=str(image.directory.parent),
            template_dir=str(self.open_dir / "templates"),
            volumes_dir=str(volumes),
            qemu=self.wrapper(
                'args=(); for each; do [ "$each" = -no-reboot ] || args+=("$each"); done; '
                'case "$*" in *defer*) args+=('
                f'-kernel {image.kernel} -initrd {image.initrd} -append "{_KERNEL}");; esac; '
                'set -- "${args[@]}"'
            ),
        )
        return begun

    def machine_image(self) -> GuestImage:
        """Return the guest image as a pod's own, whose agent's only container is the VM, which has a unit."""
        made = images.current(IMAGES)
        directory = self.open_dir / "images" / "machine"
        shutil.copytree(made.directory, directory, ignore=shutil.ignore_patterns("disk.raw"))
        for each in (directory.parent, directory):
            each.chmod(0o755)
        image = attrs.evolve(made, directory=directory, key=secrets.token_hex(12), providers=("machine",))
        images.write(image)
        (directory.parent / images.CURRENT).symlink_to(directory.name)
        subprocess.run(["cp", "--sparse=always", made.disk, image.disk], check=True)
        with mounted(image.disk, self.open_dir / "root") as root:
            (root / "etc/infranetes/vmserver.toml").write_text(_AGENT)
            (root / "etc/systemd/system/boots.service").write_text(_UNIT)
            wants = root / "etc/systemd/system/multi-user.target.wants"
            (wants / "boots.service").symlink_to("../boots.service")
        return image

    def client(self, instance: Instance) -> AgentClient:
        endpoint = wrapClientTLS(
            self.authority.client_options(instance.sandbox_id),
            HostnameEndpoint(reactor, instance.agent_host, instance.agent_port),
        )
        channel = Channel(reactor, endpoint)
        self.channels.append(channel)
        return AgentClient(instance.sandbox_id, channel)

    async def machine(self, provider: QemuProvider) -> tuple[Instance, AgentClient]:
        """Launch a VM that is a running container, with the volume at /data, and a secret."""
        instance = await self.running(provider, self.spec())
        await self.agent_info(instance)
        client = self.client(instance)
        serial = await self.within(provider.volumes.attach(instance.id, "pvc-1", False))
        await client.mount_disk(serial, "ext4", ["noatime"])
        await self.bring_secret(client)
        mounts = [
            cri.Mount(container_path="/data", host_path=PREFIX + serial),
            cri.Mount(container_path="/secret", host_path=PREFIX + _SECRET, readonly=True),
        ]
        config = cri.ContainerConfig(mounts=mounts)
        await client.create(_ID, "sha256:" + "0" * 64, config, cri.PodSandboxConfig())
        await client.start(_ID)
        return instance, client

    async def bring_secret(self, client: AgentClient) -> None:
        """Put a secret into the VM's memory."""
        directory = self.open_dir / "secret"
        directory.mkdir(exist_ok=True)
        (directory / "key").write_text("hidden\n")
        tree = Tree(directory, file=False, setid=False)

        async def changes() -> AsyncIterator[Change]:
            for change in read(tree, ordered(scan(tree, _BOUNDS).values())):
                yield change

        await client.put_volume(_SECRET, file=False, in_memory=True, bounds=_BOUNDS, changes=changes())

    async def ran(self, client: AgentClient, *command: str) -> str:
        """Run a command in the VM, and return its output."""
        return (await client.exec_sync(_ID, command, 20, 30.0, 4096)).stdout.decode()

    async def lines(self, client: AgentClient, path: str, count: int, seconds: float = _SECONDS) -> list[str]:
        """Wait until a file in the VM has so many lines, and return them."""
        until = reactor.seconds() + seconds
        found: list[str] = []
        while len(found) < count:
            self.assertLess(reactor.seconds(), until, f"{path}: {found}")
            await self.sleep(1.0)
            with contextlib.suppress(InfranetesError):  # the VM may be rebooting
                found = (await self.ran(client, "cat", path)).split()
        self.assertEqual(len(found), count)
        return found

    async def test_its_units_have_them_after_a_reboot_too_and_the_next_pod_what_they_wrote(self) -> None:
        provider = await self.started()
        assert isinstance(provider, QemuProvider)
        instance, client = await self.machine(provider)
        first = await self.lines(client, "/data/boots", 1)
        self.assertEqual(await self.lines(client, "/secret/key", 1), ["hidden"])
        await self.ran(client, "systemctl", "--no-block", "reboot")
        second = await self.lines(client, "/data/boots", 2, _REBOOT_SECONDS)
        self.assertEqual(second[:1], first)
        self.assertNotEqual(*second)
        self.assertEqual(await self.ran(client, "ls", "/secret"), "", "it was in memory")
        await self.bring_secret(client)
        self.assertEqual(await self.lines(client, "/secret/key", 1), ["hidden"])
        self.assertEqual(await self.ran(client, "stat", "-f", "-c", "%T", "/secret"), "tmpfs\n")
        await self.within(provider.destroy(instance.id))

        _, client = await self.machine(provider)
        self.assertEqual((await self.lines(client, "/data/boots", 3))[:2], second)
