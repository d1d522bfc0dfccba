# SPDX-License-Identifier: Apache-2.0
"""The volumes of a VM without our agent are directories that are written by its way in."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from infranetes.machines.agentless.agent import BRING_AGAIN_SECONDS
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound, ResourceExhausted, Unavailable
from infranetes_common.filesync.manifest import DIRECTORY, FILE, SYMLINK, Entry
from tests.infranetes.machines.agentless.agent_case import BOUNDS, AgentCase


class VolumeTests(AgentCase):
    """Secrets, ConfigMaps and disks."""

    def test_a_secret_is_told_at_boot_as_its_readers_see_it(self) -> None:
        self.do(self.secret(b"one"))
        self.create(("/etc/keys", "v1"))
        self.assertEqual(self.hypervisor.cds[-1][0].files["/etc/keys/key"], b"one")
        self.assertNotIn("/etc/keys/..data/key", self.hypervisor.cds[-1][0].files)

    def test_a_part_of_a_volume_is_told_where_it_is_mounted(self) -> None:
        self.do(self.secret(b"one"))
        self.create(("/etc/my.key", "v1/key"))
        self.assertEqual(self.hypervisor.cds[-1][0].files["/etc/my.key"], b"one")

    def test_a_change_before_the_start_reaches_the_cd(self) -> None:
        self.do(self.secret(b"one"))
        self.create(("/etc/keys", "v1"))
        self.do(self.secret(b"two"))
        self.assertEqual(self.hypervisor.cds[-1][0].files["/etc/keys/key"], b"two")
        self.assertEqual(self.way.files, {})

    def test_a_change_of_a_running_guest_is_brought_into_it(self) -> None:
        self.do(self.secret(b"one"))
        self.run_guest(("/etc/keys", "v1"))
        self.do(self.secret(b"two"))
        self.assertEqual(self.way.files, {"/etc/keys": {"key": b"two"}})

    def test_one_that_does_not_reach_the_guest_is_brought_later(self) -> None:
        self.do(self.secret(b"one"))
        self.run_guest(("/etc/keys", "v1"))
        self.way.answer = Unavailable("it is booting")
        self.do(self.secret(b"two"))
        self.reactor.advance(BRING_AGAIN_SECONDS)
        self.assertEqual(self.way.files, {})
        self.way.answer = None
        self.reactor.advance(BRING_AGAIN_SECONDS)
        self.assertEqual(self.way.files, {"/etc/keys": {"key": b"two"}})
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_a_closed_agent_brings_nothing_any_more(self) -> None:
        self.do(self.secret(b"one"))
        self.run_guest(("/etc/keys", "v1"))
        self.way.answer = Unavailable("it is booting")
        self.do(self.secret(b"two"))
        self.do(self.agent.close())
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.assertEqual((self.way.files, self.way.closed), ({}, True))

    def test_nor_does_one_that_is_closed_while_a_way_is_looked_for(self) -> None:
        self.do(self.secret(b"one"))
        self.run_guest(("/etc/keys", "v1"))
        self.way.answer = Unavailable("it is booting")
        self.do(self.secret(b"two"))
        answer: Deferred[None] = Deferred()
        self.way.answer = answer
        self.reactor.advance(BRING_AGAIN_SECONDS)
        self.do(self.agent.close())
        self.assertTrue(answer.called, "the way is still asked")
        self.assertEqual((self.way.files, self.reactor.getDelayedCalls()), ({}, []))

    def test_a_change_while_another_is_brought_is_brought_too(self) -> None:
        self.do(self.secret(b"one"))
        self.do(self.secret(b"1", id="v2"))
        self.run_guest(("/etc/keys", "v1"), ("/etc/more", "v2"))
        self.way.answer = Unavailable("it is booting")
        self.do(self.secret(b"two"))
        answer: Deferred[None] = Deferred()
        self.way.answer = answer
        self.reactor.advance(BRING_AGAIN_SECONDS)
        changing = start(self.secret(b"2", id="v2"))
        self.way.answer = Unavailable("not yet")
        answer.errback(self.way.answer)
        self.successResultOf(changing)
        self.way.answer = None
        self.reactor.advance(BRING_AGAIN_SECONDS)
        self.assertEqual(self.way.files, {"/etc/keys": {"key": b"two"}, "/etc/more": {"key": b"2"}})
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_a_later_daemon_knows_where_a_volume_is_mounted(self) -> None:
        self.do(self.secret(b"one"))
        self.run_guest(("/etc/keys", "v1"))
        self.agent = self.make_agent()
        self.do(self.secret(b"two"))
        self.assertEqual(self.way.files, {"/etc/keys": {"key": b"two"}})
        self.assertEqual(self.hypervisor.cds[-1][0].files["/etc/keys/key"], b"two")

    def test_what_was_put_is_listed_and_what_was_not_is_unknown(self) -> None:
        self.do(self.secret(b"one"))
        listed = self.do(self.agent.list_volume("v1", BOUNDS))
        self.assertEqual(listed[b"..2026/key"].size, 3)
        self.refused(NotFound, self.agent.list_volume("v2", BOUNDS))
        self.do(self.agent.remove_volume("v1"))
        self.refused(NotFound, self.agent.list_volume("v1", BOUNDS))

    def test_a_large_volume_is_refused_and_changes_nothing(self) -> None:
        self.do(self.secret(b"one"))
        big = Entry(b"big", FILE, 0o644, 0, 0, 9 << 20, 1)
        why = self.refused(ResourceExhausted, self.put("v1", big, *[b"x" * (1 << 20)] * 9))
        self.assertIn("PersistentVolumeClaim", why)
        self.assertNotIn(b"big", self.do(self.agent.list_volume("v1", BOUNDS)))

    def test_a_link_out_of_the_volume_shows_nothing(self) -> None:
        self.do(
            self.put(
                "v1",
                Entry(b"", DIRECTORY, 0o755, 0, 0),
                Entry(b"shadow", SYMLINK, 0o777, 0, 0, target=b"/etc/shadow"),
                Entry(b"up", SYMLINK, 0o777, 0, 0, target=b"../../x"),
                Entry(b"around", SYMLINK, 0o777, 0, 0, target=b"around"),
                Entry(b"here", SYMLINK, 0o777, 0, 0, target=b"."),
            )
        )
        self.create(("/v", "v1"))
        self.assertEqual(list(self.hypervisor.cds[-1][0].files), ["address"])

    def test_disks_are_told_with_where_they_are_mounted(self) -> None:
        self.do(self.agent.mount_disk("abc", "ext4", ["noatime"]))
        self.do(self.agent.find_disk("raw1"))
        self.create(("/data", "abc"))
        self.assertEqual(
            [(one.serial, one.mount_path, one.filesystem) for one in self.facts[-1].disks],
            [("abc", "/data", "ext4"), ("raw1", "", "")],
        )

    def test_a_volume_of_no_mount_does_not_change_the_cds(self) -> None:
        self.create()
        self.do(self.secret(b"one"))
        self.assertEqual(self.hypervisor.calls, ["insert_cds"])
