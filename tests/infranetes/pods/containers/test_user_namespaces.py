# SPDX-License-Identifier: Apache-2.0
"""The containers of a pod, and their mounts, share its user namespace."""

from __future__ import annotations

from typing import Any

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import box, pod
from tests.support.user_namespaces import FIRST, ids, namespaces, of_container, of_pod


def mount(uids: list[cri.IDMapping], gids: list[cri.IDMapping]) -> cri.Mount:
    return cri.Mount(container_path="/data", host_path="/srv", uidMappings=uids, gidMappings=gids)


class UserNamespaceTests(ContainersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.world.node.inventory.sandboxes[self.sandbox].config = pod(linux=of_pod(namespaces()))

    def refused(self, config: Any) -> str:
        return str(self.failureResultOf(self.start_create(config), InvalidArgument).value)

    def test_a_container_with_the_ids_of_its_pod_is_made(self) -> None:
        mounts = [mount(ids(), ids()), mount([], [])]
        self.create(box(linux=of_container(namespaces()), mounts=mounts))

    def test_other_ids_are_refused_and_nothing_is_made(self) -> None:
        for options in (namespaces(FIRST + 1), cri.NamespaceOption()):
            self.assertIn("userns_options: not the sandbox's", self.refused(box(linux=of_container(options))))
        for others in (mount(ids(FIRST + 1), ids()), mount(ids(), ids(FIRST + 1))):
            wanted = box(linux=of_container(namespaces()), mounts=[mount([], []), others])
            self.assertIn("config.mounts[1] at /data: uidMappings", self.refused(wanted))
        self.assertEqual((self.agent.calls, self.world.store.contents().containers), ([], ()))
