# SPDX-License-Identifier: Apache-2.0
"""Pods with a user namespace, with a daemon that is a process and simulated machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infranetes.volumes.mounts import Source
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry, needs_root
from tests.infranetes.daemon.case import DaemonCase
from tests.support.user_namespaces import FIRST, ids, namespaces, of_container, of_pod
from txgrpc import Code

OUTSIDE = 70000  # an id that is not mapped in the pod


@needs_root
@slow(6, "a machine boots, and its containers have users of their own")
@needs_registry
class UserNamespaceTests(DaemonCase):
    """Machines with simulated containers claim to support user namespaces."""

    def setUp(self) -> None:
        super().setUp()
        self.files = Path(os.path.realpath(self.root)) / "kubelet"
        self.files.mkdir()

    def mount(self, path: Path, first: int = FIRST, **fields: Any) -> Any:
        mapping: Any = {"uidMappings": ids(first), "gidMappings": ids(first)} if first else {}
        return cri.Mount(container_path=f"/mnt/{path.name}", host_path=str(path), **mapping, **fields)

    def in_vm(self, path: Path) -> Path:
        """Return the path's place in the machine."""
        (found,) = self.root.rglob(f"{Source(str(path), False, False).id}/*")
        return found

    def own(self, name: str = "main", **fields: Any) -> Any:
        return self.box(name, "sleep 1000", linux=of_container(namespaces()), **fields)

    def owners(self, shared: Path, name: str) -> tuple[int, int, int]:
        """Return a new file's user and group on the node, and the user of `user`; -1: it is missing."""
        new = shared / name
        if not new.exists():
            return -1, -1, -1
        return new.stat().st_uid, new.stat().st_gid, (shared / "user").stat().st_uid

    def is_recorded(self, name: str) -> bool:
        """Return whether it is on record that the node and the VM both have a file."""
        records = (self.root / "state" / "volumes").rglob("*")
        return any(f'"{name}"' in path.read_text() for path in records if path.is_file())

    async def test_owners_of_files_are_the_pods_there_and_the_nodes_here(self) -> None:
        await self.start()
        shared, secret = self.files / "shared", self.files / "secret"
        for directory in (shared, secret):
            directory.mkdir()
        for name, owner in (("root", 0), ("user", 1000), ("other", OUTSIDE)):
            (shared / name).write_text(name)
            os.chown(shared / name, owner, owner)
        (secret / "key").write_text("first")
        mounts = [self.mount(shared), self.mount(secret, readonly=True)]
        sandbox = await self.run_pod(linux=of_pod(namespaces()))
        container = await self.run_container(sandbox, self.own(mounts=mounts))
        there = self.in_vm(shared)
        owners = {name: (there / name).stat().st_uid for name in ("root", "user", "other")}
        self.assertEqual((owners["root"], owners["user"]), (FIRST, FIRST + 1000))
        self.assertNotIn(owners["other"] - FIRST, range(65536))
        self.assertEqual(there.stat().st_gid, FIRST)
        self.assertEqual((self.in_vm(secret) / "key").stat().st_uid, FIRST)
        for name in ("new", "newer"):
            (there / name).write_text("new")
            os.chown(there / name, FIRST + 7, FIRST + 8)
            os.chown(there / "user", FIRST, FIRST)
            await self.until(lambda: self.owners(shared, name) == (7, 8, 0), "carried with its owner")  # noqa: B023
            self.assertEqual((shared / "other").stat().st_uid, OUTSIDE)
            (secret / "key").write_text(name)
            await self.until(lambda: (self.in_vm(secret) / "key").read_text() == name, "carried")  # noqa: B023
            # If it were killed before that, the next daemon could not tell who had created or removed it.
            await self.until(lambda: self.is_recorded(name), "both are known to have it")  # noqa: B023
            await self.restart()
            (shared / name).unlink()
            await self.until(lambda: not (there / name).exists(), "carried by the next daemon")  # noqa: B023
            os.chown(shared / "user", 1000, 1000)
            await self.until(lambda: (there / "user").stat().st_uid == FIRST + 1000, "its owner too")
        status = await self.container_status(container)
        self.assertEqual(status.state, cri.CONTAINER_RUNNING)

    async def test_a_container_and_its_mounts_have_the_ids_of_their_pod(self) -> None:
        await self.start()
        directory = self.files / "shared"
        directory.mkdir()
        sandbox = await self.run_pod(linux=of_pod(namespaces()))
        plain = await self.run_pod("plain")
        bad = Code.INVALID_ARGUMENT
        for pod, config, words in (
            (sandbox, self.box(), "userns_options"),
            (sandbox, self.box(linux=of_container(namespaces(FIRST + 1))), "userns_options"),
            (plain, self.own(), "userns_options"),
            (sandbox, self.own(mounts=[self.mount(directory, FIRST + 1)]), "config.mounts[0]"),
            (plain, self.box(mounts=[self.mount(directory)]), "config.mounts[0]"),
        ):
            self.assertIn(words, await self.refused(bad, self.create(pod, config)))
        await self.create(sandbox, self.own(mounts=[self.mount(directory)]))
        differs = self.create(sandbox, self.own("other", mounts=[self.mount(directory, 0)]))
        self.assertIn("with other ids", await self.refused(Code.FAILED_PRECONDITION, differs))

    async def test_a_pod_that_chooses_docker_is_refused_and_a_node_that_does_offers_none(self) -> None:
        for contprovider, offered in (("", True), ("oci", True), ("docker", False)):
            self.config["contprovider"] = contprovider
            await self.start()
            status = await self.runtime.Status(cri.StatusRequest(), timeout=10.0)
            self.assertEqual(status.features.user_namespaces_host_network, offered)
            self.assertEqual({one.features.user_namespaces for one in status.runtime_handlers}, {offered})
            if offered:
                docker = {"infranetes.io/containers": "docker"}
                pod = self.run_pod(linux=of_pod(namespaces()), annotations=docker)
                self.assertIn("userns_options", await self.refused(Code.INVALID_ARGUMENT, pod))
                await self.kill()
        pod = self.run_pod(linux=of_pod(namespaces()))
        self.assertIn("contprovider", await self.refused(Code.INVALID_ARGUMENT, pod))
        self.assertEqual(await self.sandboxes(), [])
