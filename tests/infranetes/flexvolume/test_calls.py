# SPDX-License-Identifier: Apache-2.0
"""kubelet's calls, down to the mount on the node: the command, the control socket, and file volumes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

from twisted.internet import reactor as the_reactor
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.control.volumes import MAX_SIZE, VolumeCalls
from infranetes.csi.publisher import Publisher
from infranetes.flexvolume.cli import answer
from infranetes.flexvolume.client import Failed, call
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume, read
from infranetes_common import errors
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound
from infranetes_common.wire import control
from tests.harness.needs import needs_mounts
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.csi.case import NODE, without_vms
from tests.infranetes.flexvolume.test_options import KUBELETS
from txgrpc import Server
from txgrpc import Service as GrpcService

reactor: Any = the_reactor  # Any: only tests use it

MIB = 1 << 20
NAMESPACE = "kubernetes.io/pod.namespace"


class CallCase(TestCase):
    timeout = 240

    async def setUp(self) -> None:
        self.root = Path(
            os.path.realpath(tempfile.mkdtemp(prefix="flex-"))
        )  # a socket's path has to be short
        self.addCleanup(shutil.rmtree, self.root, True)
        self.addCleanup(self.unmount_all)
        self.data = f"data-{uuid4().hex[:12]}"  # unique, as other tests share the node's mounts
        self.lent = f"{self.data}-lent"
        self.own = f"flex.shop.{self.data}"
        self.volumes = QemuVolumes(reactor, self.root / "volumes", NODE, without_vms())
        self.publisher = Publisher(reactor, self.volumes)
        self.addCleanup(self.publisher.close)
        self.calls = VolumeCalls(self.publisher, ["shop", "mine", f"shop/{self.lent}"])

    def unmount_all(self) -> None:
        table = MountTable()
        for one in reversed(list(table.mounts())):
            if one.mount_point.startswith(os.fsencode(f"{self.root}/")):
                subprocess.run(["umount", "-l", os.fsdecode(one.mount_point)], check=True)
        table.close()

    def target(self, pod: str = "uid-1") -> str:
        return str(self.root / "pods" / pod / "volumes" / "infranetes.io~volume" / "data")

    def there(self, target: str = "") -> PublishedVolume | None:
        table = MountTable()
        try:
            return read(target or self.target(), table)
        finally:
            table.close()


@needs_mounts
class CommandTests(CallCase):
    """Calls through the socket, as the command makes them."""

    async def setUp(self) -> None:
        await super().setUp()
        self.socket = str(self.root / "control.sock")
        calls = GrpcService(control.Control, self.calls)
        server = Server(reactor, [calls], translate_error=errors.to_grpc)
        self.port = await UNIXServerEndpoint(reactor, self.socket).listen(server.factory)
        self.addCleanup(self.port.stopListening)

    async def ask(self, *arguments: str) -> tuple[str, str]:
        """Return the status and the message of the command's answer."""
        found = await deferToThread(answer, ["--socket", self.socket, *arguments])
        return str(found["status"]), str(found.get("message", ""))

    async def mount(self, target: str = "", **given: str) -> tuple[str, str]:
        uid = (target or self.target()).split("/")[-4]
        kubelets = {**KUBELETS, "kubernetes.io/pod.uid": uid, "kubernetes.io/pvOrVolumeName": self.data}
        options = {**kubelets, **given}
        return await self.ask("mount", target or self.target(), json.dumps(options))

    async def refused(self, words: str, target: str = "", **given: str) -> None:
        status, message = await self.mount(target, **given)
        self.assertEqual((status, words in message), ("Failure", True), message)
        self.assertIsNone(self.there(target))

    async def test_a_path_stands_for_a_volume_until_it_is_unmounted(self) -> None:
        await self.volumes.create(self.lent, MIB)
        os.makedirs(self.target())  # as kubelet does
        for _ in range(2):
            self.assertEqual(await self.mount(volumeID=self.lent), ("Success", ""))
            self.assertEqual(self.there(), PublishedVolume(self.lent))
        for _ in range(2):
            self.assertEqual(await self.ask("unmount", self.target()), ("Success", ""))
            self.assertFalse(os.path.exists(self.target()))

    async def test_all_that_is_asked_of_it_is_told(self) -> None:
        given = {"kubernetes.io/readwrite": "ro", "kubernetes.io/mounterArgs.FsGroup": "0"}
        self.assertEqual(
            await self.mount(volumeID=self.data, size="8Mi", format="xfs", **given), ("Success", "")
        )
        self.assertEqual(self.there(), PublishedVolume(self.own, "xfs", (), True, 0))

    async def test_a_namespace_has_volumes_of_its_own(self) -> None:
        """None of them is another namespace's, CSI's, or one that was made by hand."""
        mine, theirs = {NAMESPACE: "mine"}, {NAMESPACE: "theirs"}
        for name in (self.data, self.lent):
            await self.volumes.create(name, MIB)
        for given in ("", "1Mi"):
            words = "volumes.flexvolumes in the daemon's configuration"
            for name in (self.data, self.lent):
                await self.refused(words, volumeID=name, size=given, **theirs)
        await self.refused("namespace mine has no volume", volumeID=self.data, **mine)
        self.assertEqual(await self.mount(volumeID=self.data, size="1Mi", **mine), ("Success", ""))
        mounted = self.there()
        assert mounted is not None
        self.assertNotEqual(mounted.volume, self.data)

    async def test_names_that_can_be_no_file_s_are_told_apart(self) -> None:
        found: set[str] = set()
        for name in (self.data, self.data.upper(), "a" * 128, "a" * 127 + "b", "a/b", "flex.mine.a"):
            for namespace in ("mine", "m" * 63):
                calls = VolumeCalls(self.publisher, ["*"])
                target = self.target(f"uid-{len(found)}")
                request = control.MountVolumeRequest(
                    target=target,
                    pod_uid=f"uid-{len(found)}",
                    volume=name,
                    size=MIB,
                    namespace=namespace,
                )
                made = (await calls.MountVolume(request, NO_CALL)).volume
                self.assertEqual(made, (await self.volumes.get(made)).id)
                found.add(made)
        self.assertEqual(len(found), 12)

    async def test_a_volume_is_made_when_it_is_first_used_and_found_again(self) -> None:
        for pod in ("uid-1", "uid-2"):
            self.assertEqual(await self.mount(self.target(pod), size="1500Ki"), ("Success", ""))
            (disk,) = await self.volumes.list()
            self.assertEqual(disk.size, 2 * MIB)  # in whole units
            self.assertEqual(self.there(self.target(pod)), PublishedVolume(disk.id))
            self.assertEqual(await self.ask("unmount", self.target(pod)), ("Success", ""))
        for _ in range(2):
            self.assertEqual(await self.mount(volumeID=self.data, size="1Mi"), ("Success", ""))
        self.assertEqual((await self.volumes.get(self.own)).size, MIB)

    async def test_one_that_is_not_there_is_not_made_unasked(self) -> None:
        await self.refused("no volume", volumeID=self.data)
        await self.refused("no volume", volumeID=self.lent)
        await self.refused("can't be a volume's id", volumeID="../data", size="1Mi")
        self.assertEqual(await self.volumes.list(), [])

    async def test_there_is_no_room_for_it(self) -> None:
        await self.refused("64 TiB", volumeID=self.data, size="1000Pi")
        self.assertEqual(await self.volumes.list(), [])

    async def test_a_second_pod_waits_until_the_first_has_gone(self) -> None:
        second = self.target("uid-2")
        await self.mount(volumeID=self.data, size="1Mi")
        await self.refused("one pod's at a time", second, volumeID=self.data)
        await self.ask("unmount", self.target())
        self.assertEqual(await self.mount(second, volumeID=self.data), ("Success", ""))

    async def test_what_is_not_ours_is_not_unmounted(self) -> None:
        os.makedirs(self.target())
        await deferToThread(subprocess.run, ["mount", "-t", "tmpfs", "tmpfs", self.target()], check=True)
        status, message = await self.ask("unmount", self.target())
        self.assertEqual((status, "not one of Infranetes' volumes" in message), ("Failure", True), message)
        self.assertTrue(os.path.ismount(self.target()))

    async def test_what_can_not_be_read_any_more_is_unmounted(self) -> None:
        await self.mount(volumeID=self.data, size="1Mi")
        (Path(self.target()) / "volume.json").unlink()
        other = self.target("uid-2")
        self.assertEqual(await self.mount(other, size="1Mi"), ("Success", ""))  # it is in nobody's way
        self.assertEqual(await self.ask("unmount", self.target()), ("Success", ""))
        self.assertFalse(os.path.exists(self.target()))


class ServiceTests(CallCase):
    """Requests that the daemon itself refuses, from any client."""

    async def refused(self, error: type[InfranetesError], **fields: Any) -> None:  # Any: of the request
        given = {
            "target": self.target(),
            "pod_uid": "uid-1",
            "volume": self.data,
            "namespace": "mine",
            **fields,
        }
        try:
            await self.calls.MountVolume(control.MountVolumeRequest(**given), NO_CALL)
        except error:
            self.assertEqual(await self.volumes.list(), [])
        else:
            self.fail("it was not refused")

    async def test_paths_where_kubelet_has_no_volumes(self) -> None:
        for target in (
            "",
            "pods/uid-1/volumes/a~b/data",
            "/etc",
            "/pods/uid-1/volumes/data",
            f"{self.root}/pods/uid-1/volumes/plain/data",
            f"{self.root}/pods/uid-1/volumes/a~b/../a~b/data",
            f"{self.root}/pods/uid-1/volumes/a~b/..",
            f"{self.root}//pods/uid-1/volumes/a~b/data",
            f"{self.root}/pods/uid-1/volumes/a~b/data/",
            f"{self.root}/pods/uid-1/volumes/a~b/{'d' * 4096}",
            self.target("uid-2"),
        ):
            await self.refused(InvalidArgument, target=target, size=MIB)
        for target in ("", "/etc", f"{self.root}/pods/uid-1/volumes/a~b/.."):
            request = control.UnmountVolumeRequest(target=target)
            with self.assertRaises(InvalidArgument):
                await self.calls.UnmountVolume(request, NO_CALL)

    async def test_what_no_volume_can_be(self) -> None:
        for fields in (
            {"volume": ""},
            {"volume": "a" * 129},
            {"size": -1},
            {"size": MAX_SIZE + 1},
            {"filesystem": "btrfs"},
            {"group": 2**32 - 1},
            {"pod_uid": ""},
            {"namespace": ""},
            {"namespace": "a.b"},
            {"namespace": "*"},
        ):
            await self.refused(InvalidArgument, **{"size": MIB, **fields})
        await self.refused(NotFound)

    async def test_a_provider_without_volumes(self) -> None:
        self.calls = VolumeCalls(None, [])
        await self.refused(FailedPrecondition)


class ClientTests(CallCase):
    """Daemons that give bad answers."""

    def listen(self) -> tuple[str, socket.socket]:
        path = str(self.root / "control.sock")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(path)
        listening.listen()
        self.addCleanup(listening.close)
        return path, listening

    async def words(self, path: str, seconds: float) -> str:
        request = control.UnmountVolumeRequest(target=self.target())
        try:
            await deferToThread(call, path, "UnmountVolume", request, seconds)
        except Failed as error:
            return str(error)
        return self.fail("it has not failed")

    async def test_one_that_says_nothing_is_not_waited_for_for_ever(self) -> None:
        path, _ = self.listen()
        self.assertIn("did not answer within 0.1 s", await self.words(path, 0.1))

    async def test_one_that_hangs_up_or_speaks_otherwise(self) -> None:
        path, listening = self.listen()

        def serve(said: bytes) -> None:
            with listening.accept()[0] as link:
                link.recv(65536)
                link.sendall(said)

        for said in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10):
            served = deferToThread(serve, said)
            self.assertIn("can't be asked", await self.words(path, 30.0))
            await served
