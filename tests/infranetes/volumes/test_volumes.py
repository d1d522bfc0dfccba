# SPDX-License-Identifier: Apache-2.0
"""A carried volume's life, from the first container that mounts it to the last, and over daemons."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred

from infranetes.pods.node.inventory import Container, Inventory
from infranetes.pods.store.records import Contents
from infranetes.volumes import volumes as module
from infranetes.volumes.config import VolumesConfig
from infranetes.volumes.mounts import Source
from infranetes.volumes.records import OwnRecord, VolumeRecords
from infranetes.volumes.volumes import TRIES, Volumes
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts, needs_root
from tests.infranetes.volumes.carrying_case import CarryingCase, Lanes, OneSandbox


class _Inventory:
    """All sandboxes."""

    def __init__(self, *sandboxes: OneSandbox) -> None:
        self.sandboxes = {each.id: each for each in sandboxes}

    def __iter__(self) -> Any:
        return iter(self.sandboxes.values())


class VolumesCase(CarryingCase):
    def setUp(self) -> None:
        super().setUp()
        self.patch(module, "Lanes", Lanes)
        self.fake.config = cri.PodSandboxConfig()
        self.records = VolumeRecords(self.top / "records")
        self.volumes = self.daemon()
        self.volume_id = Source(str(self.node), False, False).id
        self.there = self.agent.path(self.volume_id)

    def daemon(self, show_space: bool = False) -> Volumes:
        """Return the volumes as a new daemon has them."""
        made = Volumes(cast(Any, self.clock), self.top / "records", VolumesConfig(show_space=show_space))
        self.addCleanup(lambda: self.successResultOf(start(made.stop())))
        self.successResultOf(start(made.load(Contents())))
        return made

    def mount(self, path: Path | None = None, **fields: Any) -> cri.Mount:
        return cri.Mount(container_path="/data", host_path=str(path or self.node), **fields)

    def prepare(self, container: Container, *mounts: cri.Mount) -> Deferred[cri.ContainerConfig]:
        return start(self.volumes.prepare(container, cri.ContainerConfig(mounts=mounts or [self.mount()])))

    def prepared(self, id: str, *mounts: cri.Mount) -> cri.ContainerConfig:
        return self.successResultOf(self.prepare(self.container(id), *mounts))

    def release(self, id: str) -> None:
        container = cast(Container, self.fake.containers[id])
        self.successResultOf(start(self.volumes.release(container)))

    def caught_up(self, id: str) -> None:
        container = cast(Container, self.fake.containers[id])
        self.successResultOf(start(self.volumes.caught_up(container)))

    def recorded(self) -> list[tuple[str, ...]]:
        """Return the containers of each recorded volume of the sandbox."""
        return [one.containers for one in self.records.load().get("s1", [])]


class ContainerTests(VolumesCase):
    def test_its_mounts_name_what_is_in_the_vm(self) -> None:
        (self.node / "file").write_text("content")
        config = self.prepared("c1", self.mount(readonly=True, recursive_read_only=True))
        (mount,) = config.mounts
        self.assertEqual((mount.host_path, mount.readonly), (PREFIX + self.volume_id, True))
        self.assertEqual(self.agent.calls, ["list", "put"])
        self.assertEqual((self.there / "file").read_text(), "content")
        self.assertEqual(self.recorded(), [("c1",)])

    def test_one_that_may_be_written_to_is_compared_once_and_watched(self) -> None:
        self.prepared("c1")
        self.assertEqual(self.agent.calls, ["list", "put", "watch"])

    def test_what_the_vm_has_already_is_left_alone(self) -> None:
        image = cri.Mount(container_path="/image", image=cri.ImageSpec(image="x"))
        disk = cri.Mount(container_path="/disk", host_path=f"{PREFIX}disk")
        config = self.prepared("c1", image, disk)
        self.assertEqual([each.host_path for each in config.mounts], ["", f"{PREFIX}disk"])
        self.assertEqual((self.agent.calls, self.recorded()), ([], []))

    def test_an_error_names_the_mount(self) -> None:
        self.agent.failing = {"put": ResourceExhausted("no room")}
        found = self.failureResultOf(self.prepare(self.container("c1")), ResourceExhausted)
        self.assertIn(f"config.mounts[0] ({self.node} at /data): no room", str(found.value))

    def test_a_tree_that_is_being_written_is_tried_a_few_times(self) -> None:
        self.agent.failing = {"put": Unavailable("being written")}
        waiting = self.prepare(self.container("c1"))
        for _ in range(TRIES - 1):
            self.assertNoResult(waiting)
            self.clock.advance(0.1)
        self.failureResultOf(waiting, Unavailable)
        self.assertEqual(self.agent.calls.count("put"), TRIES)
        waiting = self.prepare(self.container("c1"))
        self.agent.failing = {}
        self.clock.advance(0.1)
        self.successResultOf(waiting)

    def test_one_that_failed_leaves_nothing_once_it_is_released(self) -> None:
        self.agent.failing = {"put": ResourceExhausted("no room")}
        self.failureResultOf(self.prepare(self.container("c1")), ResourceExhausted)
        self.assertEqual(self.recorded(), [("c1",)], "known before it is in the VM")
        self.release("c1")
        self.release("c1")
        self.assertEqual((self.recorded(), self.agent.calls[-1]), ([], "remove"))

    def test_the_last_container_takes_it_out_of_the_vm(self) -> None:
        for id in ("c1", "c2"):
            self.prepared(id)
        self.assertEqual(self.recorded(), [("c1", "c2")])
        self.release("c1")
        self.assertEqual((self.recorded(), self.there.exists()), ([("c2",)], True))
        self.release("c1")
        self.release("c2")
        self.assertEqual((self.recorded(), self.there.exists()), ([], False))

    def test_of_several_that_which_another_container_mounts_stays(self) -> None:
        other = self.top / "other"
        other.mkdir()
        self.prepared("c2")
        for mounts in ([self.mount(), self.mount(other)], [self.mount(other)]):
            self.prepared("c1", *mounts)
            self.release("c1")
            self.assertEqual((self.recorded(), os.listdir(self.vm)), ([("c2",)], [self.volume_id]))

    def test_a_container_that_comes_while_the_last_one_goes_keeps_it(self) -> None:
        self.prepared("c1")
        self.agent.held["list"] = Deferred()
        self.clock.advance(VolumesConfig().interval)
        (volume,) = self.volumes._volumes["s1"].values()
        volume.due = True
        self.clock.advance(VolumesConfig().interval)
        self.assertTrue(volume.lock.locked)
        going = start(self.volumes.release(cast(Container, self.fake.containers["c1"])))
        coming = self.prepare(self.container("c2"))
        self.agent.held.pop("list").callback(None)
        self.successResultOf(going)
        self.successResultOf(coming)
        self.assertEqual((self.recorded(), self.there.exists()), ([("c2",)], True))
        self.assertNotIn("remove", self.agent.calls)

    def test_a_vm_that_goes_while_its_last_container_does(self) -> None:
        self.prepared("c1")
        self.agent.held["list"] = Deferred()
        (volume,) = self.volumes._volumes["s1"].values()
        volume.due = True
        self.clock.advance(VolumesConfig().interval)
        self.assertTrue(volume.lock.locked)
        going = start(self.volumes.release(cast(Container, self.fake.containers["c1"])))
        self.assertNoResult(going)
        self.volumes.disconnected(self.sandbox)
        self.successResultOf(going)
        self.assertEqual((self.recorded(), self.volumes._volumes), ([], {}))

    def test_an_agent_that_is_away_keeps_no_record(self) -> None:
        self.prepared("c1")
        self.agent.failing = {"remove": Unavailable("away")}
        self.release("c1")
        self.assertEqual(self.recorded(), [])
        self.agent.failing = {}
        self.prepared("c2")
        self.fake.client = None
        self.release("c2")
        self.assertEqual(self.recorded(), [])

    def test_one_that_any_container_may_write_to_is_carried_both_ways(self) -> None:
        self.prepared("c1", self.mount(readonly=True))
        (self.there / "evil").touch()
        self.clock.advance(VolumesConfig().interval)
        self.assertEqual(os.listdir(self.node), [])
        self.prepared("c2")
        self.prepared("c3", self.mount(readonly=True))
        self.assertIn("evil", os.listdir(self.node))

    def test_a_program_of_the_vms_has_no_rights_of_its_owners_on_the_node(self) -> None:
        self.prepared("c1")
        (self.there / "evil").write_text("#!/bin/sh")
        (self.there / "evil").chmod(0o6755)
        self.caught_up("c1")
        self.assertEqual((self.node / "evil").stat().st_mode & 0o7777, 0o755)

    @needs_root
    def test_files_have_the_ids_that_the_pod_sees(self) -> None:
        (self.node / "given").write_text("content")
        ids = [cri.IDMapping(host_id=100_000, container_id=0, length=65536)]
        self.prepared("c1", self.mount(uidMappings=ids, gidMappings=ids))
        given, made = self.there / "given", self.there / "made"
        self.assertEqual((given.stat().st_uid, given.stat().st_gid), (100_000, 100_000))
        made.write_text("its own")
        os.chown(made, 100_005, 100_006)
        self.caught_up("c1")
        there = (self.node / "made").stat()
        self.assertEqual((there.st_uid, there.st_gid, (self.node / "made").read_text()), (5, 6, "its own"))

    @needs_root
    def test_the_same_ids_for_all(self) -> None:
        ids = [cri.IDMapping(host_id=100_000, container_id=0, length=65536)]
        self.prepared("c1", self.mount(uidMappings=ids, gidMappings=ids))
        found = self.failureResultOf(self.prepare(self.container("c2")), FailedPrecondition)
        self.assertIn("with other ids already", str(found.value))
        self.prepared("c3", self.mount(uidMappings=ids, gidMappings=ids))
        for id in ("c1", "c2", "c3"):
            self.release(id)
        self.prepared("c4")

    def test_a_link_in_what_a_container_may_write_to_leads_no_mount_out(self) -> None:
        secret = self.top / "secret"
        secret.mkdir()
        self.prepared("c1")
        (self.node / "link").symlink_to(secret)
        waiting = self.prepare(self.container("c2"), self.mount(self.node / "link"))
        self.failureResultOf(waiting, InvalidArgument)
        self.release("c1")
        both = self.prepare(self.container("c3"), self.mount(self.node / "link"), self.mount())
        self.failureResultOf(both, InvalidArgument)
        self.release("c3")
        self.prepared("c4", self.mount(readonly=True))
        self.prepared("c5", self.mount(self.node / "link", readonly=True))

    def test_what_is_mounted_later_counts_where_mounts_are_not_private(self) -> None:
        for propagation, private in (
            (cri.PROPAGATION_PRIVATE, True),
            (cri.PROPAGATION_HOST_TO_CONTAINER, False),
        ):
            self.prepared("c1", self.mount(propagation=propagation, readonly=True))
            (volume,) = self.volumes._volumes["s1"].values()
            self.assertEqual(volume.layout is not None, private)
            self.release("c1")

    @needs_mounts
    def test_what_is_mounted_below_a_read_only_mount_comes_with_it_once(self) -> None:
        for name in ("a", "b"):
            (self.node / name).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.node / name], check=True)
            self.addCleanup(subprocess.run, ["umount", "-l", str(self.node / name)])
            (self.node / name / name).touch()
        given = cri.Mount(container_path="/data/b", host_path=str(self.node / "b"), readonly=True)
        config = self.prepared("c1", self.mount(readonly=True), given)
        self.assertEqual(
            [(each.container_path, each.readonly) for each in config.mounts],
            [("/data", True), ("/data/b", True), ("/data/a", False)],
        )
        ids = [each.host_path.removeprefix(PREFIX) for each in config.mounts]
        self.assertEqual([sorted(os.listdir(self.agent.path(id))) for id in ids], [["a", "b"], ["b"], ["a"]])

    def test_what_is_the_vms_own_is_not_carried(self) -> None:
        async def prepare(*_: object) -> str:
            return "own/below"

        self.patch(self.volumes._own, "prepare", prepare)
        (mount,) = self.prepared("c1").mounts
        self.assertEqual((mount.host_path, self.agent.calls), (f"{PREFIX}own/below", []))

    def test_what_it_wrote_last_is_brought_once_for_all_who_ask(self) -> None:
        self.prepared("c1")
        (self.there / "late").touch()
        held = self.agent.held["read"] = Deferred()
        container = cast(Container, self.fake.containers["c1"])
        one, other = (start(self.volumes.collect(container)) for _ in range(2))
        self.assertNoResult(other)
        held.callback(None)
        self.assertEqual([self.successResultOf(each) for each in (one, other)], ["", ""])
        self.assertEqual((os.listdir(self.node), self.agent.calls.count("read")), (["late"], 1))
        (self.there / "later").touch()
        self.successResultOf(start(self.volumes.collect(container)))
        self.assertEqual(os.listdir(self.node), ["late"], "its end is told once")
        self.release("c1")
        self.assertEqual(self.volumes._flushes, {})

    def test_what_may_be_missing_is_what_it_could_write_to(self) -> None:
        other = self.top / "a"
        other.mkdir()
        self.prepared("c1", self.mount(), self.mount(other))
        self.prepared("c2", self.mount(readonly=True))
        self.prepared("c3", self.mount(other))
        for id, paths in (("c1", f"{other}, {self.node}"), ("c3", f"{other}")):
            words = self.volumes.unwritten(cast(Container, self.fake.containers[id]))
            self.assertEqual(words, f"what it wrote last to {paths} may be missing on the node")
        self.assertEqual(self.volumes.unwritten(self.container("c4")), "")
        (self.top / "b").mkdir()
        self.prepared("c5", self.mount(self.top / "b", readonly=True))
        self.assertEqual(self.volumes.unwritten(cast(Container, self.fake.containers["c5"])), "")

    def test_a_command_waits_for_what_it_wrote(self) -> None:
        self.prepared("c1")
        (self.there / "result").touch()
        self.caught_up("c1")
        self.assertEqual(os.listdir(self.node), ["result"])


class DaemonTests(VolumesCase):
    def resumed(self, *sandboxes: OneSandbox) -> None:
        self.successResultOf(start(self.volumes.stop()))
        self.volumes = self.daemon()
        self.successResultOf(start(self.volumes.resume(cast(Inventory, _Inventory(*sandboxes)))))

    def test_the_next_daemon_goes_on(self) -> None:
        self.prepared("c1")
        (self.there / "in the vm").touch()
        (self.node / "on the node").touch()
        self.resumed(self.fake)
        self.clock.advance(VolumesConfig().interval)
        for side in (self.node, self.there):
            self.assertEqual(sorted(os.listdir(side)), ["in the vm", "on the node"])
        self.release("c1")
        self.assertEqual((self.recorded(), self.there.exists()), ([], False))

    def test_it_knows_what_was_removed_while_there_was_none(self) -> None:
        (self.node / "a").touch()
        self.prepared("c1")
        (self.node / "a").unlink()
        self.resumed(self.fake)
        self.clock.advance(VolumesConfig().interval)
        self.assertEqual((os.listdir(self.node), os.listdir(self.there)), ([], []))

    def test_it_forgets_what_is_no_containers_and_no_sandboxs(self) -> None:
        self.prepared("c1")
        self.prepared("c2")
        del self.fake.containers["c1"]
        self.resumed(self.fake)
        self.release("c2")
        self.assertEqual(self.recorded(), [])
        self.prepared("c3")
        del self.fake.containers["c3"]
        self.resumed(self.fake)
        self.assertEqual((self.recorded(), self.volumes._volumes), ([], {"s1": {}}))
        self.prepared("c4")
        self.resumed()
        self.assertEqual((self.recorded(), self.volumes._volumes), ([], {}))
        self.agent.calls.clear()
        self.clock.advance(10 * VolumesConfig().interval)
        self.assertEqual(self.agent.calls, [])

    @needs_root
    def test_it_goes_on_with_the_ids_that_the_pod_sees(self) -> None:
        ids = [cri.IDMapping(host_id=100_000, container_id=0, length=65536)]
        self.prepared("c1", self.mount(uidMappings=ids, gidMappings=ids))
        (self.node / "a").touch()
        self.resumed(self.fake)
        self.clock.advance(VolumesConfig().interval)
        self.assertEqual((self.there / "a").stat().st_uid, 100_000)

    def test_nothing_goes_on_once_it_stops(self) -> None:
        self.volumes = self.daemon(show_space=True)
        self.prepared("c1")
        self.successResultOf(start(self.volumes.stop()))
        self.assertEqual((self.clock.getDelayedCalls(), self.agent.watching), ([], 0))
        self.assertTrue(cast(Lanes, self.volumes._lanes).closed)
        self.assertEqual(self.volumes._mounts._watched, -1, "no file is kept open")

    def test_the_vms_own_are_brought_again_and_forgotten_too(self) -> None:
        seen: list[str] = []

        async def bring_again(_: object) -> None:
            seen.append("brought")

        def forget(_: object) -> bool:
            seen.append("forgotten")
            return True

        self.patch(self.volumes._own, "bring_again", bring_again)
        self.patch(self.volumes._own, "forget", forget)
        self.successResultOf(start(self.volumes.live(self.sandbox)))
        self.records.save_own("s1", OwnRecord(Source("/cache", False, False), "vm-1"))
        self.volumes.disconnected(self.sandbox)
        self.assertEqual((seen, self.records.load_own()), (["brought", "forgotten"], {}))

    def test_nothing_of_a_sandbox_whose_vm_is_gone_stays(self) -> None:
        self.prepared("c1")
        self.volumes.disconnected(self.sandbox)
        self.volumes.disconnected(self.sandbox)
        self.assertEqual((self.recorded(), self.clock.getDelayedCalls()), ([], []))

    def test_what_a_reboot_has_taken_from_the_vms_memory_is_brought_again(self) -> None:
        (self.node / "a").touch()
        self.prepared("c1", self.mount(readonly=True))
        (self.there / "a").unlink()
        self.successResultOf(start(self.volumes.live(self.sandbox)))
        self.clock.advance(VolumesConfig().interval)
        self.assertEqual(os.listdir(self.there), ["a"])
