# SPDX-License-Identifier: Apache-2.0
"""How image references are parsed."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.reference import is_registry, parse
from infranetes_common.errors import InvalidArgument

DIGEST = "sha256:" + "0123456789abcdef" * 4

GOOD = {
    "busybox": "docker.io/library/busybox:latest",
    "busybox:1.36": "docker.io/library/busybox:1.36",
    "docker.io/busybox": "docker.io/library/busybox:latest",
    "index.docker.io/busybox": "docker.io/library/busybox:latest",
    "docker.io/library/busybox:latest": "docker.io/library/busybox:latest",
    "team/app": "docker.io/team/app:latest",
    "localhost/app": "localhost/app:latest",
    "localhost:5000/x": "localhost:5000/x:latest",
    "localhost:5000/x:5000": "localhost:5000/x:5000",
    "127.0.0.1:5000/a/b/c:v1": "127.0.0.1:5000/a/b/c:v1",
    "[::1]:5000/x": "[::1]:5000/x:latest",
    "quay.io/a/b.c_d__e-f---g:T_a.g-1": "quay.io/a/b.c_d__e-f---g:T_a.g-1",
    "REGISTRY.local/x": "REGISTRY.local/x:latest",
    f"busybox@{DIGEST}": f"docker.io/library/busybox@{DIGEST}",
    f"busybox:1.36@{DIGEST}": f"docker.io/library/busybox@{DIGEST}",
    f"localhost:5000/x@{DIGEST}": f"localhost:5000/x@{DIGEST}",
    "x:" + "t" * 128: "docker.io/library/x:" + "t" * 128,
}

BAD = (
    "", " ", "busybox ", "Busybox", "REGISTRY/x",
    "docker.io/Library/busybox", "busybox:", "busybox:-x", "busybox:.x",
    "busybox@", "busybox@sha256:", f"busybox@{DIGEST.upper()}", f"busybox@{DIGEST}0", "busybox@md5:abc",
    "a//b", "/a", "a/", "-a", "a-", "a..b", "a.-b", "a___b", "host:port/x", "host:/x", "http://host/x",
    "x:" + "t" * 129, "a" * 256, "0" * 64, "../x", "a/../b", "x\n", "x\0", "x;rm", "--help", "-x:1", "é",
    "oci:x:y", "docker://busybox", "x:a:b", "x@y@" + DIGEST, "a." + "b" * 300 + "/x", "[::1/x", "user@host/x",
)  # fmt: skip


class ParseTests(SynchronousTestCase):
    def test_names_are_completed_as_docker_does(self) -> None:
        for text, full in GOOD.items():
            self.assertEqual(str(parse(text)), full)

    def test_a_full_name_stays_as_it_is(self) -> None:
        for full in GOOD.values():
            self.assertEqual(str(parse(full)), full)

    def test_malformed_ones_are_refused_in_words(self) -> None:
        for text in BAD:
            error = self.assertRaises(InvalidArgument, parse, text)
            self.assertIn("image reference", str(error))
            self.assertLess(len(str(error)), 400)

    def test_uppercase_is_named_as_the_reason(self) -> None:
        self.assertIn("lower case", str(self.assertRaises(InvalidArgument, parse, "docker.io/Library/x")))

    @given(st.text(alphabet=string.ascii_letters + string.digits + "./:@-_[] \n\0", max_size=90))
    def test_whatever_comes_is_read_the_same_twice_or_refused(self, text: str) -> None:
        try:
            full = parse(text)
        except InvalidArgument:
            return
        self.assertEqual(parse(str(full)), full)
        self.assertFalse(str(full).startswith("-"))
        self.assertEqual(bool(full.tag), not full.digest)

    def test_registries(self) -> None:
        for good in ("localhost", "localhost:5000", "a.b", "127.0.0.1:80", "[::1]:5000"):
            self.assertTrue(is_registry(good), good)
        for bad in ("", "http://a", "a/b", "a:b", "a b", ":5000"):
            self.assertFalse(is_registry(bad), bad)
