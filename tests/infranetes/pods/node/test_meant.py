# SPDX-License-Identifier: Apache-2.0
"""Which sandbox a person means by a pod's name or by an id."""

from __future__ import annotations

import secrets

from infranetes.pods.node.meant import (
    MAX_NAME,
    find_sandbox,
    present_sandbox,
    sandbox_with_vm,
    sandboxes_with_vms,
)
from infranetes.pods.sandboxes import sandboxes
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase

WEB, OTHER_WEB, DATABASE = "abc" + "1" * 29, "abd" + "2" * 29, "f00" + "3" * 29


class MeantCase(PodsTestCase):
    """Pods default/web and other/web, whose ids begin alike, and default/database."""

    def setUp(self) -> None:
        super().setUp()
        self.ids: list[str] = []
        self.patch(sandboxes, "new_id", self.new_id)
        self.run_named("default", "web", WEB)
        self.run_named("other", "web", OTHER_WEB)
        self.run_named("default", "database", DATABASE)
        self.inventory = self.world.node.inventory

    def new_id(self) -> str:
        return self.ids.pop(0) if self.ids else secrets.token_hex(16)  # the token comes after the id

    def run_named(self, namespace: str, name: str, id: str, attempt: int = 0) -> None:
        metadata = cri.PodSandboxMetadata(
            namespace=namespace, name=name, uid=f"{namespace}-{name}", attempt=attempt
        )
        self.ids = [id]
        self.assertEqual(self.run_pod(cri.PodSandboxConfig(metadata=metadata)), id)
        self.world.clock.advance(1)  # no two are made at the same time

    def stop(self, id: str) -> None:
        self.do(self.world.sandboxes.stop(id))

    def remove(self, id: str) -> None:
        self.stop(id)
        self.do(self.world.sandboxes.remove(id))

    def found(self, word: str) -> str:
        return find_sandbox(self.inventory, word).record.id

    def refused(self, word: str) -> str:
        return str(self.assertRaises(InvalidArgument, self.found, word))


class FindTests(MeantCase):
    def test_by_namespace_and_name(self) -> None:
        self.assertEqual([self.found("default/web"), self.found("other/web")], [WEB, OTHER_WEB])

    def test_by_a_name_that_one_namespace_has(self) -> None:
        self.assertEqual(self.found("database"), DATABASE)

    def test_a_name_of_several_namespaces_is_refused_with_what_it_may_mean(self) -> None:
        said = self.refused("web")
        for part in ("several pods", "'web'", f"default/web ({WEB[:13]})", f"other/web ({OTHER_WEB[:13]})"):
            self.assertIn(part, said)
        self.assertNotIn("database", said)

    def test_by_an_id_and_by_its_beginning(self) -> None:
        self.assertEqual([self.found(WEB), self.found("abd"), self.found("f")], [WEB, OTHER_WEB, DATABASE])

    def test_a_beginning_of_several_ids_is_refused(self) -> None:
        self.assertIn("several pods", self.refused("ab"))

    def test_so_is_a_beginning_of_two_ids_of_one_pod(self) -> None:
        self.stop(WEB)
        self.run_named("default", "web", "abc" + "9" * 29, attempt=1)
        self.assertIn("several pods", self.refused("abc"))

    def test_what_is_in_the_midst_of_an_id_or_name_means_nothing(self) -> None:
        for word in ("bc1", WEB + "1", "atabase", "default/webs", "efault/web", "/web"):
            self.assertIn(repr(word), str(self.assertRaises(NotFound, self.found, word)))

    def test_by_the_beginning_of_a_name_unless_it_has_to_be_whole(self) -> None:
        for word in ("data", "default/d"):
            self.assertEqual(self.found(word), DATABASE)
            with self.assertRaises(NotFound):
                find_sandbox(self.inventory, word, whole=True)
        self.assertIn("several pods", self.refused("default/"))

    def test_a_name_goes_before_the_beginning_of_an_id(self) -> None:
        self.run_named("default", "ab", "9" * 32)
        self.assertEqual(self.found("ab"), "9" * 32)

    def test_of_one_pods_sandboxes_the_newest_is_meant(self) -> None:
        self.stop(WEB)
        self.run_named("default", "web", "0" * 32, attempt=1)  # whose id is the least
        self.assertEqual(self.found("default/web"), "0" * 32)
        self.assertEqual(self.found(WEB), WEB)

    def test_nothing_is_refused(self) -> None:
        self.assertIn("no pod is named", self.refused(""))

    def test_only_so_much_of_a_word_is_looked_at_and_said_again(self) -> None:
        with self.assertRaises(NotFound) as caught:
            self.found("x" * (MAX_NAME + 1))
        self.assertIn("x" * MAX_NAME, str(caught.exception))
        self.assertNotIn("x" * (MAX_NAME + 1), str(caught.exception))

    def test_at_most_five_of_many_are_listed(self) -> None:
        for number in range(6):
            self.run_named(f"n{number}", "web", f"e{number}" * 16)
        self.assertEqual(self.refused("web").count("/web"), 5)


class GoneTests(MeantCase):
    """Sandboxes that are gone are found as long as they are remembered."""

    def test_one_that_is_gone_is_found_where_no_other_is_meant(self) -> None:
        self.remove(DATABASE)
        self.assertEqual([self.found("database"), self.found("f00")], [DATABASE, DATABASE])

    def test_one_that_is_there_goes_before_a_newer_one_that_is_gone(self) -> None:
        self.run_named("third", "database", "c" * 32)
        self.remove("c" * 32)
        self.assertEqual(self.found("database"), DATABASE)

    def test_of_those_that_are_gone_the_newest_is_found(self) -> None:
        self.remove(WEB)
        self.run_named("default", "web", "0" * 32, attempt=1)
        self.remove("0" * 32)
        self.assertEqual(self.found("default/web"), "0" * 32)

    def test_only_those_that_are_there_are_present(self) -> None:
        self.assertEqual(present_sandbox(self.inventory, "database").id, DATABASE)
        self.remove(DATABASE)
        said = str(self.assertRaises(FailedPrecondition, present_sandbox, self.inventory, "database"))
        self.assertIn(f"{DATABASE} is gone", said)
        self.assertRaises(NotFound, present_sandbox, self.inventory, "unknown")


class WithVmTests(MeantCase):
    def names(self) -> list[str]:
        return [one.pod for one in sandboxes_with_vms(self.inventory)]

    def test_they_are_in_the_order_of_their_names(self) -> None:
        self.assertEqual(self.names(), ["default/database", "default/web", "other/web"])

    def test_one_that_has_stopped_is_none_of_them(self) -> None:
        self.stop(WEB)
        self.assertEqual(self.names(), ["default/database", "other/web"])
        self.assertEqual(sandbox_with_vm(self.inventory, "web").id, OTHER_WEB)
        self.assertRaises(NotFound, sandbox_with_vm, self.inventory, "default/web")

    def test_a_long_word_is_cut(self) -> None:
        with self.assertRaises(NotFound) as caught:
            sandbox_with_vm(self.inventory, "x" * (MAX_NAME + 1))
        self.assertNotIn("x" * (MAX_NAME + 1), str(caught.exception))
