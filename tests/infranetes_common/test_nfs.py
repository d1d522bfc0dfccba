# SPDX-License-Identifier: Apache-2.0
"""Which NFS mounts a VM's kernel can make by itself, and which are refused, with what to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.nfs import ID, checked

_SOURCE = "files.example.com:/srv/data"
_V4 = ("hard", "proto=tcp", "timeo=600", "retrans=2", "sec=sys", "vers=4.2", "addr=192.0.2.7")
_V3 = ("vers=3", "nolock", "addr=192.0.2.7", "mountaddr=192.0.2.7", "mountvers=3", "mountport=20048",
       "mountproto=udp", "local_lock=all")  # fmt: skip


class NfsTests(SynchronousTestCase):
    def refused(
        self, *options: str, kind: type[Exception] = FailedPrecondition, source: str = _SOURCE
    ) -> str:
        return str(self.assertRaises(kind, checked, source, options))

    def test_the_same_mount_is_the_same_volume_and_another_is_not(self) -> None:
        mount = checked(_SOURCE, _V4)
        self.assertEqual(mount, checked(_SOURCE, reversed(_V4)))
        self.assertRegex(mount.id, ID)
        self.assertEqual((mount.address, mount.version), ("192.0.2.7", "4.2"))
        others = [checked(_SOURCE, _V3), checked(f"{_SOURCE}2", _V4), checked(_SOURCE, (*_V4, "noexec"))]
        self.assertEqual(len({mount.id, *(one.id for one in others)}), 4)

    def test_an_address_of_ipv6_will_do(self) -> None:
        options = ("vers=4.1", "proto=tcp6", "addr=2001:db8::7")
        self.assertEqual(checked("[2001:db8::7]:/", options).address, "2001:db8::7")

    def test_what_a_vm_lacks_is_said(self) -> None:
        self.assertIn("no Kerberos", self.refused(*_V4[:-3], "sec=krb5p", *_V4[-2:]))
        self.assertIn("proto=tcp", self.refused("vers=3", "nolock", "proto=udp", "addr=192.0.2.7"))
        self.assertIn("versions 3, 4.0", self.refused("vers=2", "addr=192.0.2.7"))
        self.assertIn(
            "vers=4.2", self.refused(*(one for one in _V3 if one not in ("nolock", "local_lock=all")))
        )
        self.assertIn("'xprtsec=tls'", self.refused(*_V4, "xprtsec=tls"))

    def test_an_address_that_is_the_nodes_alone_is_refused(self) -> None:
        for address in ("127.0.0.1", "::1", "169.254.1.1", "fe80::1", "0.0.0.0"):
            self.assertIn("only the node has that address", self.refused("vers=4.2", f"addr={address}"))

    def test_what_is_no_mount_is_refused(self) -> None:
        for source in ("/dev/sda", "host", "host:relative", "a b:/x", "host:/x\n", ":/x", "h:/" + "x" * 4096):
            self.refused(*_V4, kind=InvalidArgument, source=source)
        for options in (("vers=4.2",), ("addr=192.0.2.7",), ("vers=4.2", "addr=::g"), (*_V4, "timeo=7")):
            with self.assertRaises(InfranetesError):
                checked(_SOURCE, options)

    @given(st.text(max_size=40))
    def test_no_text_is_more_than_one_option(self, text: str) -> None:
        try:
            mount = checked(_SOURCE, (*_V4, text))
        except InfranetesError:
            return
        self.assertEqual(len(",".join(mount.options).split(",")), len({*_V4, text}))
        self.assertTrue(",".join(mount.options).isascii())
