# SPDX-License-Identifier: Apache-2.0
"""Annotations of pods that providers understand."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import machine_annotations
from infranetes.providers.annotations import PREFIX, TABLE, Wishes, read, refuse_unknown
from infranetes_common.errors import InvalidArgument

TREE = Path(__file__).resolve().parents[3]


class AnnotationTests(SynchronousTestCase):
    def test_names_and_aliases_mean_the_same(self) -> None:
        values = {"gpus": "2", "spot-max-price": "0.5", "elastic-address": "new", "metadata-access": "deny"}
        for row in TABLE:
            value = values.get(row.name, "true")
            for name in row.aliases:
                self.assertEqual(read({name: value}), read({PREFIX + row.name: value}))

    def test_the_go_versions_names_are_aliases(self) -> None:
        taken = {alias for row in TABLE for alias in row.aliases}
        aws = "image instancetype securtiygroup securitygroup region subnet elasticip iaminstancename"
        expected = {f"infranetes.aws.{name}" for name in aws.split()}
        others = ("startproxy", "sethostname", "createinterface", "sharedpaths")
        self.assertEqual(taken, expected | {f"infranetes.{name}" for name in others})

    def test_a_value_that_does_not_fit_is_refused_by_name(self) -> None:
        for name, value in (
            ("infranetes.io/gpus", "many"),
            ("infranetes.io/gpus", "-1"),
            ("infranetes.io/spot", "maybe"),
            ("infranetes.io/spot-max-price", "0"),
            ("infranetes.io/instance-type", "m5.large; rm"),
            ("infranetes.aws.securtiygroup", "sg-1,,sg-2"),
            ("infranetes.io/subnet", "x" * 5000),
            ("infranetes.io/metadata-access", "yes"),
            ("infranetes.io/containers", "podman"),
            ("infranetes.io/containers", ""),
            ("infranetes.io/disk", "40"),
            ("infranetes.io/disk", "0Gi"),
        ):
            error = self.assertRaises(InvalidArgument, read, {name: value})
            self.assertIn(name, str(error))

    def test_two_names_with_two_values_are_refused(self) -> None:
        both = {"infranetes.io/subnet": "subnet-1", "infranetes.aws.subnet": "subnet-2"}
        self.assertRaises(InvalidArgument, read, both)
        both["infranetes.aws.subnet"] = "subnet-1"
        self.assertEqual(read(both).subnet, "subnet-1")

    def test_annotations_of_others_are_ignored(self) -> None:
        others = {"example.org/spot": "x", "simulated.infranetes.io/behaviour": "y", "infranetes.other": "z"}
        self.assertEqual(read({**others, "infranetes.io/executable-url": "https://x"}), Wishes())

    def test_an_unknown_name_with_the_providers_own_prefix_is_refused_and_others_are_not(self) -> None:
        known = ["simulated.infranetes.io/after"]
        for provider, name, meant in (
            ("simulated", "simulated.infranetes.io/aftr", "did you mean simulated.infranetes.io/after?"),
            ("aws", "infranetes.aws.imag", "did you mean infranetes.aws.image?"),
            ("qemu", "qemu.infranetes.io/disk", "not known to the provider qemu"),
        ):
            refused = self.assertRaises(InvalidArgument, refuse_unknown, provider, {name: "1"}, known)
            self.assertIn(meant, str(refused))
            refuse_unknown("gcp", {name: "1"})
        refuse_unknown("simulated", {known[0]: "1", "simulated.infranetes.io": "1"}, known)
        refuse_unknown("aws", {"infranetes.aws.securtiygroup": "sg-1"})

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        for name in ("infranetes.io/gpu", "infranetes.io/", "infranetes.io/Spot"):
            error = self.assertRaises(InvalidArgument, read, {name: "1"})
            for word in (name, "gpus", "instance-type"):
                self.assertIn(word, str(error))

    def test_what_a_provider_does_not_support_is_refused_by_name(self) -> None:
        read({"infranetes.io/gpus": "0", "infranetes.io/spot": "false"}).refuse_others("x", ())
        read({"infranetes.io/disk": "40Gi"}).refuse_others("x", ("disk",))
        self.assertEqual(read({"infranetes.io/disk": "40Gi"}).disk, 40 << 30)
        for name, value in (("gpus", "1"), ("disk", "1Gi"), ("instance-type", "m5.large"), ("spot", "true")):
            wishes = read({f"infranetes.io/{name}": value})
            error = self.assertRaises(InvalidArgument, wishes.refuse_others, "x", ())
            self.assertIn(f"infranetes.io/{name}", str(error))

    def test_the_page_has_every_row(self) -> None:
        text = (TREE / "docs" / "annotations.md").read_text()
        rows = {
            name: (re.findall(r"`([^`]+)`", aliases), value)
            for name, aliases, value in re.findall(r"^\| `([^`]+)` \|([^|]*)\| ([^|]*) \|", text, flags=re.M)
        }
        tables = (*TABLE, *machine_annotations.TABLE)
        expected = {PREFIX + row.name: (list(row.aliases), row.expected) for row in tables}
        self.assertEqual(rows, expected)
