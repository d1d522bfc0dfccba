# SPDX-License-Identifier: Apache-2.0
"""A node's guests are reached by keys of their own, and told of their pods."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs
import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.daemon.guests import NodeGuests
from infranetes.identity.guest_keys import GuestSecrets
from infranetes.machines.agentless.access import GuestFile
from infranetes.machines.agentless.configuration import GuestDisk, PodFacts
from infranetes.providers import machine_annotations
from infranetes.providers.machine_annotations import GuestChoices
from infranetes.providers.machine_images import Cd
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Network
from tests.infranetes.machines.agentless.fakes import FakeHypervisor
from tests.support.inline_threads import InlineThreads

FACTS = PodFacts(
    "s1",
    "team",
    "web-0",
    environment={"COLOUR": "green"},
    disks=(GuestDisk("abc", "ext4", mount_path="/data"),),
)
NETWORK = Network(mac="0a:58:0a:00:00:02", address="10.0.0.2/24", gateway="10.0.0.1", mtu=1500)


def choices(**annotations: str) -> GuestChoices:
    """Return what a pod with these annotations says."""
    found = {f"infranetes.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    return machine_annotations.read(found).guest


class Objects:
    """The API server's ConfigMaps and Secrets."""

    async def of(self, namespace: str, kind: str, name: str) -> Mapping[str, bytes]:
        return {"data": f"#cloud-config\nfinal_message: {namespace}/{kind}/{name}\n".encode()}


class NodeGuestsTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.guests = self.made()

    def made(self, objects: Objects | None = None) -> NodeGuests:
        return NodeGuests(InlineThreads().reactor, GuestSecrets(self.directory), objects)

    def cds(self, said: GuestChoices, facts: PodFacts = FACTS) -> tuple[Cd, ...]:
        files = {"/etc/key": GuestFile(b"secret")}
        told = self.successResultOf(start(self.guests.configuration(facts, files, said)))
        return told.cds(NETWORK)

    def user_data(self, said: GuestChoices, facts: PodFacts = FACTS) -> str:
        (cd,) = self.cds(said, facts)
        return cd.files["user-data"].decode()

    def ways(self, said: GuestChoices) -> list[str]:
        hypervisor = FakeHypervisor()
        return [way.name for way in self.guests.ways("s1", "10.0.0.2", hypervisor, said)]

    def test_all_ways_are_tried_unless_the_pod_chooses(self) -> None:
        self.assertEqual(self.ways(choices()), ["ssh"])  # this hypervisor has no port for a guest agent
        self.assertEqual(self.ways(choices(guest="ssh")), ["ssh"])
        self.assertEqual(self.ways(choices(guest="none")), [])
        self.assertEqual(self.ways(choices(guest="guest-agent")), [])

    def test_a_guest_is_told_of_its_pod(self) -> None:
        (cd,) = self.cds(choices())
        self.assertEqual(cd.label, "cidata")
        self.assertIn("web-0", cd.files["meta-data"].decode())
        told = cd.files["user-data"].decode()
        for words in ("ssh-ed25519", "ssh_keys", "/etc/cloud/environment", "/etc/key", "abc"):
            self.assertIn(words, told)

    def test_what_is_done_once_is_done_once_for_each_root_that_stays(self) -> None:
        for facts, said in (
            (FACTS, "s1"),
            (attrs.evolve(FACTS, root="pvc-1"), "pvc-1"),
            (attrs.evolve(FACTS, sandbox_id="s2", root="pvc-1"), "pvc-1"),
        ):
            (cd,) = self.cds(choices(), facts)
            self.assertEqual(yaml.safe_load(cd.files["meta-data"])["instance-id"], said)

    def public_keys(self, facts: PodFacts = FACTS) -> set[str]:
        """Return the public keys that a guest is told."""
        return set(re.findall(r"ssh-ed25519 (\S+)", self.user_data(choices(), facts)))

    def test_the_next_daemon_tells_it_the_same_keys(self) -> None:
        before = self.public_keys()
        self.assertEqual(len(before), 2)  # the node's and its own
        self.guests = self.made()
        self.assertEqual(self.public_keys(), before)

    def test_another_guest_has_other_keys(self) -> None:
        other = PodFacts("s2", "team", "web-0")
        self.assertEqual(self.public_keys(other) & self.public_keys(), set())

    def test_a_guest_that_is_not_reached_by_ssh_gets_no_keys(self) -> None:
        self.assertNotIn("ssh-ed25519", self.user_data(choices(guest="none")))

    def test_one_that_is_told_nothing_has_no_cd(self) -> None:
        self.assertEqual(self.cds(choices(cloud_init="none")), ())

    def test_what_an_annotation_names_is_read_from_the_pods_namespace(self) -> None:
        self.guests = self.made(Objects())
        said = choices(user_data_source="configmap/boot/data")
        self.assertIn("team/configmap/boot", self.user_data(said))

    def test_without_an_api_server_it_has_to_be_mounted(self) -> None:
        said = choices(user_data_source="configmap/boot/data")
        refused = self.failureResultOf(start(self.guests.configuration(FACTS, {}, said)), InvalidArgument)
        self.assertIn("mount", str(refused.value))
