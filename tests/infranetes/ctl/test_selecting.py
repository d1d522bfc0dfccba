# SPDX-License-Identifier: Apache-2.0
"""Which pods a command line means."""

from __future__ import annotations

import argparse

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.calls import names_of_pod
from infranetes.ctl.cli import read
from infranetes.ctl.selecting import label_selector, named, selected
from infranetes_common.errors import NotFound
from infranetes_common.wire import control

PODS = [
    control.Pod(id="aa11", namespace="default", name="web-1", labels={"app": "web", "tier": "front"}),
    control.Pod(id="ab22", namespace="default", name="web-10", labels={"app": "web"}),
    control.Pod(id="bb33", namespace="kube-system", name="web-1", labels={"app": "dns", "env": ""}),
]


class SelectorTests(SynchronousTestCase):
    def meant(self, *words: str) -> list[str]:
        return [pod.id for pod in selected(PODS, read(["pods", *words]), lambda pod: pod)]

    def test_all_by_default(self) -> None:
        for words in ([], ["-A"], ["-A", "-n", "default"]):
            self.assertEqual(self.meant(*words), ["aa11", "ab22", "bb33"])

    def test_by_namespace(self) -> None:
        self.assertEqual(self.meant("-n", "kube-system"), ["bb33"])
        self.assertEqual(self.meant("-n", "kube"), [])

    def test_by_labels(self) -> None:
        for text, ids in (
            ("app=web", ["aa11", "ab22"]),
            ("app==web", ["aa11", "ab22"]),
            ("app = web , tier = front", ["aa11"]),
            ("app!=web", ["bb33"]),
            ("tier!=front", ["ab22", "bb33"]),
            ("app in (web, dns),tier", ["aa11"]),
            ("app notin (web)", ["bb33"]),
            ("env", ["bb33"]),
            ("env=", ["bb33"]),
            ("!env", ["aa11", "ab22"]),
            ("app,!tier", ["ab22", "bb33"]),
        ):
            self.assertEqual(self.meant("-l", text), ids, text)
        self.assertEqual(self.meant("-l", "app=web", "-n", "kube-system"), [])

    def test_what_is_no_selector_is_refused(self) -> None:
        for text in (
            "",
            ",",
            "app=web,",
            "app=web;tier=x",
            "a=b=c",
            "app in web",
            "=web",
            "app in (a",
            "a b",
        ):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                label_selector(text)


class NameTests(SynchronousTestCase):
    def meant(self, *words: str) -> list[str]:
        return [pod.id for pod in named(PODS, words, names_of_pod, "pod")]

    def test_by_names_and_ids_and_their_beginnings(self) -> None:
        for words, ids in (
            ([], ["aa11", "ab22", "bb33"]),
            (["web-1"], ["aa11", "bb33"]),  # and not web-10, which begins so
            (["default/web-1"], ["aa11"]),
            (["pod/web-10"], ["ab22"]),
            (["web"], ["aa11", "ab22", "bb33"]),
            (["kube-system/w"], ["bb33"]),
            (["a"], ["aa11", "ab22"]),
            (["bb33", "web-10"], ["ab22", "bb33"]),
        ):
            self.assertEqual(self.meant(*words), ids, words)

    def test_one_that_is_not_there_is_an_error_with_a_guess(self) -> None:
        with self.assertRaises(NotFound) as caught:
            self.meant("web-1", "wbe-10")
        self.assertIn("no pod 'wbe-10' here", str(caught.exception))
        self.assertIn("did you mean web-1 or web-10?", str(caught.exception))
        with self.assertRaises(NotFound) as caught:
            self.meant("nonsense")
        self.assertNotIn("did you mean", str(caught.exception))
