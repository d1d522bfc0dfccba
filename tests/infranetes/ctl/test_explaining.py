# SPDX-License-Identifier: Apache-2.0
"""What infranetes-ctl says of annotations and keys."""

from __future__ import annotations

import contextlib
import io
import json

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import main
from infranetes.ctl.explaining import all_annotations
from infranetes.providers import annotations as every_pods
from infranetes.providers import machine_annotations
from infranetes.providers.annotation_rows import PREFIX


class ExplainTests(SynchronousTestCase):
    def said(self, *words: str, code: int = 0) -> str:
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            self.assertEqual(main(["explain", *words]), code)
        return out.getvalue() or told.getvalue()

    def test_every_annotation_is_known_with_all_its_names(self) -> None:
        known = {each.name: each for each in all_annotations()}
        for row in (*every_pods.TABLE, *machine_annotations.TABLE):
            explained = known[PREFIX + row.name]
            self.assertEqual({*explained.earlier}, {*row.aliases}, row.name)
            self.assertTrue(explained.what, row.name)

    def test_it_is_found_by_each_of_its_names(self) -> None:
        for name in ("image", "infranetes.io/image", "infranetes.aws.image"):
            self.assertIn("annotation  infranetes.io/image\n", self.said(name), name)

    def test_which_pods_may_have_it(self) -> None:
        self.assertIn("for         pods whose image is the VM\n", self.said("firmware"))
        self.assertIn("for         all pods\n", self.said("disk"))

    def test_links_are_words(self) -> None:
        text = self.said("gpus")
        self.assertNotIn("](", text)
        self.assertIn("has no driver for them", " ".join(text.split()))

    def test_all_of_them_in_a_list(self) -> None:
        text = self.said()
        self.assertEqual(len(text.splitlines()), 1 + len(all_annotations()))

    def test_keys_of_the_configuration(self) -> None:
        text = self.said("control.enter")
        self.assertIn("key         control.enter\ndefault     false\n", text)
        self.assertIn("key         control.enter\n", self.said("enter"))
        self.assertIn("key         metrics.listen\n", self.said("metrics"))

    def test_documents(self) -> None:
        found = json.loads(self.said("disk", "-o", "json"))
        self.assertEqual((found["annotation"], found["example"]), ("infranetes.io/disk", "40Gi"))
        self.assertEqual(yaml.safe_load(self.said("disk", "-o", "yaml")), found)
        self.assertEqual(len(json.loads(self.said("--json"))["annotations"]), len(all_annotations()))

    def test_a_name_that_is_none_is_an_error_with_a_guess(self) -> None:
        words = self.said("infranetes.io/dsk", code=1)
        self.assertIn("no annotation and no key 'infranetes.io/dsk'; did you mean infranetes.io/disk", words)
        self.assertIn("error", json.loads(self.said("dsk", "--json", code=1)))
