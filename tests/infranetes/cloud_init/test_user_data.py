# SPDX-License-Identifier: Apache-2.0
"""A pod's own documents for cloud-init."""

from __future__ import annotations

import base64

from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.cloud_init.document import GuestDocument
from infranetes.cloud_init.user_data import MAX_BYTES, documents, ssh_keys
from infranetes.machines.agentless.access import GuestFile
from infranetes.providers.machine_annotations import GuestChoices, MountedFile, ObjectKey, Source
from infranetes_common.concurrency import deferred
from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import installed
from tests.infranetes_common.test_ssh_keys import ED25519, RSA

reactor = installed()
SCRIPT = b"#!/bin/sh\ndate\n"


def written(text: str) -> GuestDocument:
    return GuestDocument("s1", GuestChoices(user_data=text))


def held(source: Source, content: bytes = SCRIPT, *, encoded: bool = False) -> GuestDocument:
    choices = GuestChoices(user_data_source=source, user_data_base64=encoded)
    return GuestDocument(
        "s1",
        choices,
        files={"/etc/guest/user-data": GuestFile(content)},
        objects={("configmap", "vm"): {"user-data": content, "other": b"x"}},
    )


class SourceTests(SynchronousTestCase):
    def test_it_is_found_in_a_mounted_file_or_a_key_of_an_object(self) -> None:
        for source in (MountedFile("/etc/guest/user-data"), ObjectKey("configmap", "vm", "user-data")):
            (found,) = documents(held(source))
            self.assertEqual(found.content, SCRIPT)

    def test_base64_is_decoded_however_it_is_broken_into_lines(self) -> None:
        content = base64.encodebytes(SCRIPT * 20)
        (found,) = documents(held(MountedFile("/etc/guest/user-data"), content, encoded=True))
        self.assertEqual(found.content, SCRIPT * 20)

    def test_the_annotation_comes_before_the_source(self) -> None:
        choices = GuestChoices(user_data="#!/bin/a", user_data_source=MountedFile("/f"))
        document = GuestDocument("s1", choices, files={"/f": GuestFile(b"#!/bin/b")})
        self.assertEqual([each.content for each in documents(document)], [b"#!/bin/a", b"#!/bin/b"])

    def test_the_keys_of_an_object_are_those_of_a_cloud_config_as_virtlet_had_it(self) -> None:
        keys = {"runcmd": b"- date\n- [ls, /]\n", "hostname": b"web"}
        choices = GuestChoices(user_data_source=ObjectKey("configmap", "vm"))
        (found,) = documents(GuestDocument("s1", choices, objects={("configmap", "vm"): keys}))
        self.assertEqual(found.content, b"#cloud-config\nhostname:\n  web\nruncmd:\n  - date\n  - [ls, /]\n")

    def test_what_is_not_there_is_refused_with_what_was_expected(self) -> None:
        for document, words in (
            (held(MountedFile("/etc/guest/other")), "mountPath"),
            (held(ObjectKey("configmap", "vm", "missing")), "no key missing"),
            (held(ObjectKey("secret", "vm", "user-data")), "mount it"),
            (held(MountedFile("/etc/guest/user-data"), b"not base64!", encoded=True), "user-data-encoding"),
        ):
            error = self.assertRaises(InvalidArgument, documents, document)
            self.assertIn("infranetes.io/user-data-source", str(error))
            self.assertIn(words, str(error))

    def test_keys_of_people_come_from_a_file_too(self) -> None:
        choices = GuestChoices(ssh_keys=(RSA,), ssh_keys_source=MountedFile("/k"))
        good = GuestDocument("s1", choices, files={"/k": GuestFile(f"{ED25519}\n{RSA}\n".encode())})
        self.assertEqual(ssh_keys(good), (RSA, ED25519))
        bad = GuestDocument("s1", choices, files={"/k": GuestFile(b"\n-----BEGIN PRIVATE KEY-----\n")})
        error = self.assertRaises(InvalidArgument, ssh_keys, bad)
        self.assertIn("ssh-keys-source (/k): line 2: this is a private key", str(error))


class CheckTests(SynchronousTestCase):
    def refusal(self, document: GuestDocument) -> str:
        return str(self.assertRaises(InvalidArgument, documents, document))

    def test_what_says_that_it_is_yaml_has_to_be(self) -> None:
        for text, where in (
            ("#cloud-config\na: b\nc: [d\ne: f\n", "line 4"),
            ("#cloud-config\na: b\n\tc: d\n", "line 3"),
            ("#cloud-config\n" + "[" * 5000, "line 2"),
            ("#cloud-config\na: \x07\n", "YAML can't have"),
        ):
            refused = self.refusal(written(text))
            self.assertIn("annotation infranetes.io/user-data is no YAML", refused)
            self.assertIn(where, refused)

    def test_an_error_quotes_nothing_of_it(self) -> None:
        for text in ("#cloud-config\npassword: [hunter2\nhunter2: *hunter2", "password: hunter2"):
            self.assertNotIn("hunter2", self.refusal(written(text)))

    def test_a_cloud_config_is_a_mapping_or_empty(self) -> None:
        for text in ("#cloud-config\n- a\n", "#cloud-config\nhello\n"):
            self.assertIn("is a mapping", self.refusal(written(text)))
        documents(written("#cloud-config\n"))
        documents(written("\ufeff#cloud-config\na: b\n"))

    def test_a_cloud_config_that_does_not_say_so_is_refused(self) -> None:
        self.assertIn("first line is #cloud-config", self.refusal(written("runcmd:\n- date\n")))
        alone = GuestChoices(user_data="key: value\n", user_data_alone=True)
        documents(GuestDocument("s1", alone))

    def test_other_documents_are_not_read(self) -> None:
        for text in ("#!/bin/sh\n[", "## template: jinja\n#cloud-config\n{% if x %}", "#include\n[["):
            documents(written(text))

    def test_text_has_no_nul_byte_and_is_utf_8_where_it_is_yaml(self) -> None:
        file = MountedFile("/etc/guest/user-data")
        self.assertIn("NUL byte", self.refusal(held(file, b"#!/bin/sh\n\0")))
        self.assertIn("byte 14 is not UTF-8", self.refusal(held(file, b"#cloud-config\n\xe4")))
        documents(held(file, b"#!/bin/sh\necho \xe4"))

    def test_it_has_a_bound(self) -> None:
        file = MountedFile("/etc/guest/user-data")
        documents(held(file, b"#!" + b"x" * (MAX_BYTES - 2)))
        self.assertIn(f"{MAX_BYTES + 1} bytes", self.refusal(held(file, b"x" * (MAX_BYTES + 1))))


class LongTests(TestCase):
    @deferred
    async def test_a_long_one_keeps_nobody_waiting(self) -> None:
        # It has as much YAML as an annotation can hold.
        document = written("#cloud-config\nruncmd: [" + "a," * 120_000 + "]\n")
        (found,) = await deferLater(reactor, 0, documents, document)
        self.assertEqual(len(found.content), len(document.choices.user_data))
