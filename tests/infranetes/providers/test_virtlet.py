# SPDX-License-Identifier: Apache-2.0
"""The annotations of Virtlet's users."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.annotation_rows import PREFIX
from infranetes.providers.annotations import read, requests
from infranetes.providers.machine_annotations import CloudInit, ObjectKey
from infranetes.providers.machine_annotations import read as read_machine
from infranetes.providers.machine_images import DiskBus
from infranetes.providers.virtlet import TABLE, translated
from infranetes_common.errors import InvalidArgument
from tests.infranetes_common.test_ssh_keys import ED25519

TREE = Path(__file__).resolve().parents[3]

# Virtlet's own example of a cluster in a StatefulSet.
CLUSTER = {
    "kubernetes.io/target-runtime": "virtlet.cloud",
    "VirtletRootVolumeSize": "4Gi",
    "VirtletVCPUCount": "2",
    "VirtletCloudInitUserData": "write_files:\n- path: /usr/local/bin/provision.sh\n  content: x\n",
}


class TranslatedTests(SynchronousTestCase):
    def test_a_manifest_of_virtlet_means_what_it_meant(self) -> None:
        ours = translated(
            {
                **CLUSTER,
                "VirtletDiskDriver": "scsi",
                "VirtletCloudInitImageType": "ConfigDrive",
                "VirtletSSHKeys": f"{ED25519}\n",
                "VirtletSSHKeySource": "secret/people",
                "VirtletCPUModel": "host-model",
                "VirtletSystemUUID": "53008994-44c0-4017-ad44-9c49758083da",
                "VirtletCloudInitMetaData": "instance-id: foobar\n",
                "VirtletCloudInitUserDataSource": "configmap/vm-user-data",
            }
        )
        self.assertEqual(read(ours).disk, 4 << 30)
        self.assertEqual(requests(ours).cpu_millis, 2000)
        choices = read_machine(ours)
        self.assertIs(choices.hardware.disk, DiskBus.SCSI)
        self.assertEqual(choices.hardware.cpu_model, "host")
        self.assertEqual(choices.hardware.uuid, "53008994-44c0-4017-ad44-9c49758083da")
        guest = choices.guest
        self.assertIs(guest.cloud_init, CloudInit.CONFIG_DRIVE)
        self.assertEqual(guest.user_data, "#cloud-config\n" + CLUSTER["VirtletCloudInitUserData"])
        self.assertEqual(guest.user_data_source, ObjectKey("configmap", "vm-user-data"))
        self.assertEqual(guest.ssh_keys, (ED25519,))
        self.assertEqual(guest.ssh_keys_source, ObjectKey("secret", "people", "authorized_keys"))
        self.assertEqual(guest.meta_data, "instance-id: foobar\n")

    def test_annotations_of_others_stay_and_those_of_virtlet_go(self) -> None:
        ours = translated({**CLUSTER, "infranetes.io/tpm": "true", "VirtletlikeNothing": "x"})
        self.assertEqual(ours["kubernetes.io/target-runtime"], "virtlet.cloud")
        self.assertEqual(ours["infranetes.io/tpm"], "true")
        self.assertIn("VirtletlikeNothing", ours)
        self.assertNotIn("VirtletVCPUCount", ours)
        self.assertEqual(translated({"a": "b"}), {"a": "b"})

    def test_sizes_are_kubernetes_quantities(self) -> None:
        for text, size in (("1Gi", "1024Mi"), ("5G", "4769Mi"), ("1073741824", "1024Mi"), ("1", "1Mi")):
            self.assertEqual(translated({"VirtletRootVolumeSize": text}), {"infranetes.io/disk": size})

    def test_false_and_nothing_ask_for_nothing(self) -> None:
        nothing = {
            "VirtletForceDHCPNetworkConfig": "false",
            "VirtletCPUModel": "",
            "VirtletVCPUCount": "0",
            "VirtletChown9pfsMounts": "true",
            "VirtletCloudInitUserDataOverwrite": "yes",
        }
        self.assertEqual(translated(nothing), {})

    def test_a_script_is_all_of_user_data(self) -> None:
        ours = translated({**CLUSTER, "VirtletCloudInitUserDataScript": "#!/bin/sh\ndate\n"})
        guest = read_machine(ours).guest
        self.assertEqual(guest.user_data, "#!/bin/sh\ndate\n")
        self.assertTrue(guest.user_data_alone)

    def test_a_key_of_an_object_is_all_of_user_data(self) -> None:
        ours = translated(
            {
                **CLUSTER,
                "VirtletCloudInitUserDataSource": "configmap/vm",
                "VirtletCloudInitUserDataSourceKey": "user-data",
                "VirtletCloudInitUserDataSourceEncoding": "base64",
            }
        )
        guest = read_machine(ours).guest
        self.assertEqual(guest.user_data_source, ObjectKey("configmap", "vm", "user-data"))
        self.assertTrue(guest.user_data_base64 and guest.user_data_alone)
        self.assertEqual(guest.user_data, "")

    def test_overwrite_leaves_the_sources_out(self) -> None:
        given = {
            "VirtletCloudInitUserData": "a: b",
            "VirtletCloudInitUserDataSource": "configmap/vm",
            "VirtletSSHKeys": ED25519,
            "VirtletSSHKeySource": "secret/people/keys",
        }
        self.assertEqual(len(translated(given)), 4)
        guest = read_machine(translated({**given, "VirtletCloudInitUserDataOverwrite": "true"})).guest
        self.assertEqual((guest.user_data_source, guest.ssh_keys_source), (None, None))
        self.assertEqual((guest.user_data, guest.ssh_keys), ("#cloud-config\na: b", (ED25519,)))

    def test_what_can_not_be_served_is_refused_with_what_to_do(self) -> None:
        for name, value, words in (
            ("VirtletLibvirtCPUSetting", "Match: exact", "infranetes.io/cpu-model"),
            ("VirtletFilesFromDataSource", "configmap/x", "mount the ConfigMap or Secret"),
            ("VirtletVCPUCnt", "2", "did you mean VirtletVCPUCount?"),
            ("VirtletVCPUCount", "two", "infranetes.io/cpu"),
            ("VirtletRootVolumeSize", "large", "infranetes.io/disk"),
            ("VirtletCPUModel", "core2duo", "infranetes.io/cpu-model"),
            ("VirtletCloudInitUserDataSourceKey", "x", "without VirtletCloudInitUserDataSource"),
        ):
            error = self.assertRaises(InvalidArgument, translated, {name: value})
            self.assertIn(name, str(error))
            self.assertIn(words, str(error))

    def test_a_translated_value_that_contradicts_ours_is_refused(self) -> None:
        same = {"VirtletDiskDriver": "scsi", "infranetes.io/disk-bus": "scsi"}
        self.assertEqual(translated(same), {"infranetes.io/disk-bus": "scsi"})
        error = self.assertRaises(InvalidArgument, translated, {**same, "infranetes.io/disk-bus": "ide"})
        self.assertIn("infranetes.io/disk-bus and VirtletDiskDriver differ", str(error))

    def test_the_page_has_every_annotation_and_what_it_becomes(self) -> None:
        text = (TREE / "docs" / "virtlet.md").read_text()
        rows = dict(re.findall(r"^\| `(Virtlet\w+)` \| (?:`([^`]+)`)?", text, flags=re.M))
        self.assertEqual(rows, {row.name: PREFIX + row.ours if row.ours else "" for row in TABLE})
