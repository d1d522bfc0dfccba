# SPDX-License-Identifier: Apache-2.0
"""How a FlexVolume's options are read."""

from __future__ import annotations

import json
from collections.abc import Mapping

from twisted.trial.unittest import SynchronousTestCase

from infranetes.flexvolume import options
from infranetes.flexvolume.options import InvalidOptions, Volume
from infranetes.providers.volumes import MAX_NAME, is_volume_id
from infranetes.volumes import published
from infranetes_common.volume_disks import FILESYSTEMS

# What kubelet passes for a volume without options.
KUBELETS = {
    "kubernetes.io/fsType": "",
    "kubernetes.io/pod.name": "db-0",
    "kubernetes.io/pod.namespace": "shop",
    "kubernetes.io/pod.uid": "uid-1",
    "kubernetes.io/pvOrVolumeName": "data",
    "kubernetes.io/readwrite": "rw",
    "kubernetes.io/serviceAccount.name": "default",
}
GIB = 1 << 30


def volume(given: Mapping[str, str], kubelets: Mapping[str, str] = KUBELETS) -> Volume:
    return options.volume(options.read(json.dumps({**kubelets, **given})))


class VolumeTests(SynchronousTestCase):
    def refused(self, words: str, given: Mapping[str, str], kubelets: Mapping[str, str] = KUBELETS) -> None:
        self.assertIn(words, str(self.assertRaises(InvalidOptions, volume, given, kubelets)))

    def test_a_volume_by_its_id(self) -> None:
        self.assertEqual(
            volume({"volumeID": "data"}), Volume("data", 0, "ext4", False, None, "uid-1", "shop")
        )

    def test_all_that_can_be_asked(self) -> None:
        given = {
            "volumeID": "vol-1",
            "size": "10",
            "format": "xfs",
            "device": "/dev/xvdf",
            "mount": "true",
            "deviceOnly": "false",
            "kubernetes.io/readwrite": "ro",
            "kubernetes.io/mounterArgs.FsGroup": "2000",
        }
        self.assertEqual(volume(given), Volume("vol-1", 10 * GIB, "xfs", True, 2000, "uid-1", "shop"))

    def test_without_an_id_it_is_the_pods_own(self) -> None:
        made = volume({"size": "10Gi"})
        self.assertEqual((made.volume, made.size), ("db-0_data", 10 * GIB))
        names = {made.volume}
        for key, value in (("pod.name", "db-1"), ("pvOrVolumeName", "logs")):
            names.add(volume({"size": "1", f"kubernetes.io/{key}": value}).volume)
        self.assertEqual(len(names), 3)
        long = {key: "a" * 250 for key in ("kubernetes.io/pod.name", "kubernetes.io/pvOrVolumeName")}
        names = {volume({"size": "1", **long}).volume, volume({"size": "2", **long}).volume}
        self.assertEqual(len(names), 1)
        (name,) = names
        self.assertTrue(is_volume_id(name))
        self.refused("can't be a name in Kubernetes", {"size": "1", "kubernetes.io/pod.name": "a_b"})

    def test_sizes(self) -> None:
        for given, size in (("1", GIB), ("500M", 500 * 10**6), ("2Ti", 2 << 40), ("4096Ki", 4 << 20)):
            self.assertEqual(volume({"size": given}).size, size)
        for given in ("0", "-1", "1.5Gi", "1 Gi", "Gi", "9" * 30, "999999999Ti", "\u0661", "1E"):
            self.refused("is not a size", {"volumeID": "data", "size": given})

    def test_file_systems(self) -> None:
        for fs_type, form, found in (
            ("", "", "ext4"),
            ("xfs", "", "xfs"),
            ("", "xfs", "xfs"),
            ("xfs", "true", "xfs"),
            ("xfs", "false", "xfs"),
            ("ext4", "ext4", "ext4"),
        ):
            given = {"volumeID": "data", "kubernetes.io/fsType": fs_type, "format": form}
            self.assertEqual(volume(given).filesystem, found)
        self.refused("different", {"volumeID": "data", "kubernetes.io/fsType": "ext4", "format": "xfs"})
        self.refused("is not offered", {"volumeID": "data", "format": "btrfs"})

    def test_what_can_not_be_had_is_said(self) -> None:
        data = {"volumeID": "data"}
        for words, given in (
            ("deviceOnly", {**data, "deviceOnly": "true"}),
            ("mount: false", {**data, "mount": "0"}),
            ("neither true nor false", {**data, "mount": "perhaps"}),
            ("neither volumeID nor size", {}),
            ("can't be a volume's id", {"volumeID": "a" * 129}),
            ("can't be a volume's id", {"volumeID": "\u00e9"}),
            ("neither ro nor rw", {**data, "kubernetes.io/readwrite": "wo"}),
            ("no group's id", {**data, "kubernetes.io/mounterArgs.FsGroup": "-1"}),
            ("no group's id", {**data, "kubernetes.io/mounterArgs.FsGroup": str(2**32 - 1)}),
            ("is unknown; known are", {**data, "volumeId": "x"}),
            ("can't be shown", {**data, "device": "a\nb"}),
        ):
            self.refused(words, given)
        without = {key: value for key, value in KUBELETS.items() if not key.endswith("uid")}
        self.refused("pod.uid is missing", data, without)

    def test_what_the_daemon_allows_is_what_is_asked_for(self) -> None:
        self.assertEqual(options.FILESYSTEMS, FILESYSTEMS)
        self.assertEqual(options.MAX_GROUP, published.MAX_GROUP)
        self.assertEqual(options.MAX_ID, MAX_NAME)


class ReadTests(SynchronousTestCase):
    def test_what_is_no_object_of_texts_is_refused(self) -> None:
        for text in (
            "",
            "{",
            "[]",
            '"a"',
            '{"volumeID": 1}',
            '{"volumeID": {"a": "b"}}',
            "[" * 60000,
            json.dumps({"device": "a" * (128 * 1024)}),
            json.dumps({f"kubernetes.io/{number}": "" for number in range(300)}),
            "\udcff",
        ):
            self.assertRaises(InvalidOptions, options.read, text)

    def test_secrets_of_any_length_are_left_alone(self) -> None:
        given = {**KUBELETS, "kubernetes.io/secret/key": "QQ==" * 10000}
        self.assertEqual(volume({"volumeID": "data"}, given).volume, "data")

    def test_names(self) -> None:
        self.assertEqual(options.name({"volumeID": "data", **KUBELETS}), "data")
        self.assertEqual(options.name({**KUBELETS, "kubernetes.io/pvOrVolumeName": "pv"}), "pv")
        self.assertRaises(InvalidOptions, options.name, {})
