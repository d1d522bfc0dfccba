# SPDX-License-Identifier: Apache-2.0
"""User namespaces as the CRI asks for them, and what they make of ids."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.user_namespaces import IdRange, UserNamespace, mapped_ids, user_namespace
from infranetes_common.wire import cri

LAST = 2**32 - 2
IDS = st.integers(0, LAST) | st.integers(0, 300)
RANGES = st.builds(IdRange, st.integers(0, 2**31) | st.integers(0, 99), st.integers(1, 2**31 - 2))


def one(host_id: int = 1000, length: int = 65536, container_id: int = 0) -> list[cri.IDMapping]:
    return [cri.IDMapping(host_id=host_id, container_id=container_id, length=length)]


class IdRangeTests(SynchronousTestCase):
    def test_ids_inside_are_those_of_the_range(self) -> None:
        ids = IdRange(1000, 10)
        self.assertEqual([ids.outside(id) for id in (0, 9)], [1000, 1009])
        self.assertEqual([ids.inside(id) for id in (1000, 1009)], [0, 9])

    @given(RANGES, IDS)
    def test_each_id_has_one_of_its_own_that_is_an_id(self, ids: IdRange, id: int) -> None:
        outside = ids.outside(id)
        self.assertEqual(ids.inside(outside), id)
        self.assertEqual(ids.outside(ids.inside(id)), id)
        self.assertTrue(0 <= outside <= LAST)

    @given(RANGES, IDS)
    def test_an_id_that_is_not_inside_stands_for_none_inside(self, ids: IdRange, id: int) -> None:
        in_range = ids.first <= ids.outside(id) < ids.first + ids.length
        self.assertEqual(in_range, id < ids.length)


class UserNamespaceTests(SynchronousTestCase):
    def read(self, **fields: Any) -> UserNamespace | None:
        users = cri.UserNamespace(**fields)
        return user_namespace(cri.NamespaceOption(userns_options=users, pid=cri.CONTAINER), "options")

    def refused(self, words: str, **fields: Any) -> None:
        with self.assertRaises(InvalidArgument) as caught:
            self.read(**fields)
        self.assertIn(words, str(caught.exception))

    def test_without_one_it_is_the_vms(self) -> None:
        self.assertIsNone(user_namespace(cri.NamespaceOption(), "options"))
        self.assertIsNone(self.read(mode=cri.NODE))

    def test_users_and_groups_have_a_range_each(self) -> None:
        found = self.read(uids=one(), gids=one(2000, 7))
        self.assertEqual(found, UserNamespace(IdRange(1000, 65536), IdRange(2000, 7)))

    def test_what_is_malformed_is_refused_by_its_name(self) -> None:
        self.refused("options.userns_options: NODE", mode=cri.NODE, uids=one())
        for mode in (cri.CONTAINER, cri.TARGET):
            self.refused(cri.NamespaceMode.Name(mode), mode=mode)
        self.refused("options.userns_options.mode: 17", mode=17)
        self.refused("userns_options.uids: 0 mappings", gids=one())
        self.refused("userns_options.gids: 0 mappings", uids=one())
        self.refused("userns_options.uids: 2 mappings", uids=one() + one(2000), gids=one())
        self.refused("userns_options.gids: container_id is 1", uids=one(), gids=one(container_id=1))
        self.refused("userns_options.uids: 0 ids", uids=one(length=0), gids=one())
        self.refused("userns_options.gids: 65536 ids", uids=one(), gids=one(LAST - 65534))
        self.assertEqual(self.read(uids=one(), gids=one(LAST - 65535)).gids.length, 65536)  # type: ignore[union-attr]

    def test_it_can_not_be_had_with_processes_or_ipc_of_the_vm(self) -> None:
        users = cri.UserNamespace(uids=one(), gids=one())
        for field in ("pid", "ipc"):
            node: Any = {field: cri.NODE}
            options = cri.NamespaceOption(userns_options=users, **node)
            with self.assertRaises(InvalidArgument) as caught:
                user_namespace(options, "options")
            self.assertIn(f"options.{field}", str(caught.exception))

    def test_a_mount_may_have_the_ids_or_not(self) -> None:
        self.assertIsNone(mapped_ids([], [], "m"))
        found = mapped_ids(one(), one(5, 6), "m")
        self.assertEqual(found, UserNamespace(IdRange(1000, 65536), IdRange(5, 6)))
        for uids, gids, words in ((one(), [], "m: gidMappings"), ([], one(), "m: uidMappings")):
            with self.assertRaises(InvalidArgument) as caught:
                mapped_ids(uids, gids, "m")
            self.assertIn(words, str(caught.exception))
