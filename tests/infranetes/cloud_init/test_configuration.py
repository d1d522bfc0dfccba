# SPDX-License-Identifier: Apache-2.0
"""The CDs of guests."""

from __future__ import annotations

import json

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.cloud_init.configuration import configuration
from infranetes.cloud_init.configuration import user_data as of_cloud
from infranetes.cloud_init.document import GuestDocument, GuestVolume, Resolvers
from infranetes.machines.agentless.access import GuestFile
from infranetes.providers.machine_annotations import (
    CloudInit,
    GuestChoices,
    MountedFile,
    NetworkConfig,
    ObjectKey,
)
from infranetes_common.errors import InvalidArgument
from tests.infranetes.cloud_init.cases import (
    HOST_KEY,
    NETWORK,
    NODE_KEY,
    PRIVATE,
    PUBLIC,
    added,
    cds,
    files,
    parts,
    user_data,
)
from tests.infranetes_common.test_ssh_keys import ED25519, RSA

WINDOWS = GuestChoices(cloud_init=CloudInit.CONFIG_DRIVE, windows=True)


class NoCloudTests(SynchronousTestCase):
    def test_the_cd_has_the_label_and_files_that_cloud_init_looks_for(self) -> None:
        (cd,) = cds(GuestDocument("s1", hostname="web-0"))
        self.assertEqual(cd.label, "cidata")
        self.assertEqual(set(cd.files), {"meta-data", "user-data", "network-config"})
        meta = json.loads(cd.files["meta-data"])
        self.assertEqual(meta, {"instance-id": "s1", "local-hostname": "web-0"})
        self.assertTrue(cd.files["user-data"].startswith(b"#cloud-config\n"))

    def test_the_keys_of_people_are_in_the_meta_data(self) -> None:
        choices = GuestChoices(ssh_keys=(ED25519,), ssh_keys_source=ObjectKey("secret", "people"))
        held = {("secret", "people"): {"authorized_keys": f"# both\n{RSA}\n{ED25519}\n".encode()}}
        meta = json.loads(files(GuestDocument("s1", choices, objects=held))["meta-data"])
        self.assertEqual(meta["public-keys"], [ED25519, RSA])

    def test_the_pods_own_meta_data_comes_first(self) -> None:
        choices = GuestChoices(meta_data="instance-id: foobar\nrack: {row: 7}\n")
        meta = json.loads(files(GuestDocument("s1", choices, hostname="web"))["meta-data"])
        self.assertEqual(meta, {"instance-id": "foobar", "local-hostname": "web", "rack": {"row": 7}})

    def test_meta_data_that_is_no_mapping_of_plain_values_is_refused(self) -> None:
        laughs = "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(9))
        for text in ("- a", "foo", "a: [", "d: 2026-01-01", "{", laughs, "a: " + "[" * 30, "a: 'b"):
            error = self.assertRaises(
                InvalidArgument, configuration, GuestDocument("s1", GuestChoices(meta_data=text))
            )
            self.assertIn("infranetes.io/meta-data", str(error))

    def test_a_guest_keeps_its_images_name_if_it_is_given_none(self) -> None:
        document = GuestDocument("s1")
        self.assertNotIn("local-hostname", json.loads(files(document)["meta-data"]))
        self.assertIs(added(document)["preserve_hostname"], True)
        self.assertNotIn("preserve_hostname", added(GuestDocument("s1", hostname="web", node_key=NODE_KEY)))

    def test_the_host_key_is_the_nodes_and_takes_the_place_of_others(self) -> None:
        own = GuestChoices(user_data="#cloud-config\nssh_keys: {rsa_private: x}\n")
        for choices in (GuestChoices(), own):
            document = GuestDocument("s1", choices, host_key=HOST_KEY, hostname="web")
            self.assertEqual(
                added(document)["ssh_keys"], {"ed25519_private": PRIVATE, "ed25519_public": PUBLIC}
            )

    def test_the_same_guest_has_the_same_bytes(self) -> None:
        def made() -> GuestDocument:
            choices = GuestChoices(user_data="#!/bin/sh\ndate\n")
            return GuestDocument("s1", choices, node_key=NODE_KEY, files={"/etc/a/b": GuestFile(b"c")})

        self.assertEqual(cds(made()), cds(made()))

    def test_an_instance_is_the_sandbox_or_the_root_that_stays(self) -> None:
        for document, instance in (
            (GuestDocument("s1"), "s1"),
            (GuestDocument("s1", instance_id="root-7"), "root-7"),
        ):
            self.assertEqual(json.loads(files(document)["meta-data"])["instance-id"], instance)


class UserDataTests(SynchronousTestCase):
    """The pod's documents beside ours."""

    def test_each_of_the_pods_documents_arrives_byte_by_byte(self) -> None:
        for text, kind in (
            ("#cloud-config\r\nruncmd: [date]   # ü\n", "text/cloud-config"),
            ("#!/bin/sh\necho \u00e4 'From x'\nFrom y", "text/x-shellscript"),
            ("#include\nhttps://example.org/x\n", "text/x-include-url"),
            ("#cloud-boothook\n#!/bin/sh\n", "text/cloud-boothook"),
            ("## template: jinja\n#cloud-config\nx: {{ y }\n", "text/jinja2"),
            ("#ps1_sysnative\nGet-Date\n", "text/x-shellscript"),
            ("<powershell>\nGet-Date\n</powershell>", "text/x-shellscript"),
            ("whatever\n", "text/plain"),
        ):
            found = parts(user_data(GuestDocument("s1", GuestChoices(user_data=text), node_key=NODE_KEY)))
            self.assertEqual(found[0], (kind, text.encode()))
            self.assertEqual(len(found), 2)

    def test_what_is_several_already_stays_several(self) -> None:
        inner = (
            'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="b"\n\n--b\n'
            "Content-Type: text/x-shellscript\n\n#!/bin/sh\nFrom: here\n--b\n"
            "Content-Type: text/cloud-config\n\n#cloud-config\na: b\n--b--\n"
        )
        document = GuestDocument("s1", GuestChoices(user_data=inner), node_key=NODE_KEY)
        found = parts(user_data(document))
        expected = [
            ("text/x-shellscript", b"#!/bin/sh\nFrom: here"),
            ("text/cloud-config", b"#cloud-config\na: b"),
        ]
        self.assertEqual(found[:2], expected)
        self.assertEqual(len(found), 3)

    def test_compressed_user_data_of_an_object_is_kept(self) -> None:
        zipped = bytes.fromhex("1f8b08") + b"\0\xff\n"
        choices = GuestChoices(user_data_source=MountedFile("/etc/guest/ud"))
        document = GuestDocument("s1", choices, files={"/etc/guest/ud": GuestFile(zipped)})
        self.assertEqual(parts(user_data(document))[0], ("application/gzip", zipped))

    def test_a_document_alone_is_all_that_the_guest_gets(self) -> None:
        text = "#!/bin/sh\ndate\n"
        choices = GuestChoices(user_data=text, user_data_alone=True)
        document = GuestDocument("s1", choices, node_key=NODE_KEY, host_key=HOST_KEY)
        self.assertEqual(user_data(document), text.encode())

    def test_a_script_of_virtlets_users_mounts_the_volumes(self) -> None:
        choices = GuestChoices(user_data="@virtlet-mount-script@", user_data_alone=True)
        document = GuestDocument("s1", choices, volumes=(GuestVolume("vol1", "/data"),))
        self.assertTrue(user_data(document).startswith(b"#!/bin/sh\n"))
        self.assertIn(b"\nmount_disk vol1 /data ext4 rw\n", user_data(document))

    def test_two_documents_can_not_both_be_alone(self) -> None:
        choices = GuestChoices(
            user_data="#!/bin/sh", user_data_alone=True, user_data_source=MountedFile("/a/b")
        )
        document = GuestDocument("s1", choices, files={"/a/b": GuestFile(b"#!/bin/sh")})
        self.assertIn("user-data-alone", str(self.assertRaises(InvalidArgument, configuration, document)))

    def test_user_data_for_a_guest_that_is_told_nothing_is_refused(self) -> None:
        choices = GuestChoices(cloud_init=CloudInit.NONE, user_data="#!/bin/sh")
        error = self.assertRaises(InvalidArgument, configuration, GuestDocument("s1", choices))
        self.assertIn("infranetes.io/cloud-init", str(error))

    def test_a_guest_that_is_told_nothing_has_no_cd(self) -> None:
        self.assertIsNone(configuration(GuestDocument("s1", GuestChoices(cloud_init=CloudInit.NONE))))


class ConfigDriveTests(SynchronousTestCase):
    def test_the_cd_has_the_label_and_files_that_cloudbase_init_looks_for(self) -> None:
        choices = GuestChoices(
            cloud_init=CloudInit.CONFIG_DRIVE, windows=True, user_data="#ps1\nGet-Date\n", ssh_keys=(ED25519,)
        )
        (cd,) = cds(GuestDocument("s1", choices, hostname="win-0"))
        self.assertEqual(cd.label, "config-2")
        meta = json.loads(cd.files["openstack/latest/meta_data.json"])
        expected = {"uuid": "s1", "hostname": "win-0", "name": "win-0", "public_keys": {"key-0": ED25519}}
        self.assertEqual(meta, expected)
        self.assertEqual(cd.files["openstack/latest/user_data"], b"#ps1\nGet-Date\n")
        self.assertIn("openstack/latest/network_data.json", cd.files)

    def test_a_guest_that_is_told_nothing_more_has_no_user_data(self) -> None:
        self.assertNotIn("openstack/latest/user_data", files(GuestDocument("s1", WINDOWS, hostname="w")))

    def test_several_documents_begin_as_cloudbase_init_wants_them(self) -> None:
        held = {"/etc/a": GuestFile(b"x")}
        whole = user_data(GuestDocument("s1", WINDOWS, files=held, node_key=NODE_KEY))
        self.assertTrue(whole.startswith(b"Content-Type: multipart/"))
        self.assertNotIn(b"\r", whole)

    def test_windows_gets_files_and_a_script_for_its_openssh_and_no_commands_of_linux(self) -> None:
        document = GuestDocument(
            "s1", WINDOWS, hostname="w", node_key=NODE_KEY, host_key=HOST_KEY,
            files={"/etc/a": GuestFile(b"x")}, volumes=(GuestVolume("v", "/data"),), instance_id="root-7",
        )  # fmt: skip
        (first, script) = parts(user_data(document))
        self.assertEqual(set(yaml.safe_load(first[1])), {"write_files"})
        self.assertEqual(script[0], "text/x-shellscript")
        self.assertTrue(script[1].startswith(b"#ps1_sysnative\n"))
        self.assertIn(b"administrators_authorized_keys", script[1])
        self.assertNotIn(PRIVATE.encode(), script[1])

    def test_the_pods_own_meta_data_is_also_in_the_words_of_openstack(self) -> None:
        choices = GuestChoices(
            cloud_init=CloudInit.CONFIG_DRIVE, meta_data="instance-id: a\nlocal-hostname: b\n"
        )
        meta = json.loads(files(GuestDocument("s1", choices))["openstack/latest/meta_data.json"])
        self.assertEqual((meta["uuid"], meta["hostname"]), ("a", "b"))


class SysprepTests(SynchronousTestCase):
    def test_its_files_are_on_a_cd_of_their_own_and_nowhere_else(self) -> None:
        choices = GuestChoices(sysprep="/etc/sysprep", cloud_init=CloudInit.CONFIG_DRIVE)
        held = {"/etc/sysprep/Autounattend.xml": GuestFile(b"<x/>"), "/etc/other": GuestFile(b"y")}
        document = GuestDocument("s1", choices, files=held)
        (first, second) = cds(document)
        self.assertEqual((second.label, second.files), ("unattendCD", {"Autounattend.xml": b"<x/>"}))
        self.assertNotIn(b"Autounattend", first.files["openstack/latest/user_data"])

    def test_it_works_without_cloud_init(self) -> None:
        choices = GuestChoices(sysprep="/s", cloud_init=CloudInit.NONE)
        (only,) = cds(GuestDocument("s1", choices, files={"/s/Unattend.xml": GuestFile(b"x")}))
        self.assertEqual(only.label, "unattendCD")

    def test_a_directory_that_nothing_is_mounted_at_is_refused(self) -> None:
        document = GuestDocument("s1", GuestChoices(sysprep="/s"), files={"/sx/a": GuestFile(b"")})
        error = self.assertRaises(InvalidArgument, configuration, document)
        self.assertIn("infranetes.io/sysprep", str(error))
        self.assertIn("Autounattend.xml", str(error))


class NetworkConfigTests(SynchronousTestCase):
    def test_it_is_chosen_by_the_pod_and_known_last(self) -> None:
        resolvers = Resolvers(("10.96.0.10",))
        for choice, words in ((NetworkConfig.DHCP, b"dhcp4: true"), (NetworkConfig.STATIC, b"10.88.0.7/16")):
            document = GuestDocument("s1", GuestChoices(network_config=choice), resolvers=resolvers)
            self.assertIn(words, files(document, NETWORK)["network-config"])
            self.assertEqual(
                b"10.96.0.10" in files(document)["network-config"], choice is NetworkConfig.STATIC
            )


class CloudTests(SynchronousTestCase):
    """The user-data of guests whose clouds have ways of their own to tell it."""

    def test_its_name_and_keys_are_in_it_and_those_of_the_node(self) -> None:
        choices = GuestChoices(ssh_keys=(ED25519,), user_data="#cloud-config\nruncmd: [date]\n")
        told = of_cloud(GuestDocument("s1", choices, hostname="web-0", node_key=NODE_KEY, host_key=HOST_KEY))
        for words in (
            "runcmd: [date]",
            "hostname: web-0",
            ED25519,
            NODE_KEY.split()[1],
            PRIVATE.split("\n")[1],
        ):
            self.assertIn(words.encode(), told)

    def test_a_guest_that_is_to_be_told_nothing_is(self) -> None:
        self.assertEqual(of_cloud(GuestDocument("s1", GuestChoices(cloud_init=CloudInit.NONE))), b"")
        both = GuestChoices(cloud_init=CloudInit.NONE, user_data="#cloud-config\n{}\n")
        self.assertRaises(InvalidArgument, of_cloud, GuestDocument("s1", both))

    def test_a_document_alone_is_as_it_is(self) -> None:
        choices = GuestChoices(user_data="#!/bin/sh\ndate\n", user_data_alone=True)
        told = of_cloud(GuestDocument("s1", choices, hostname="web-0", node_key=NODE_KEY))
        self.assertEqual(told, b"#!/bin/sh\ndate\n")
