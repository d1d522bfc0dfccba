# SPDX-License-Identifier: Apache-2.0
"""A VM's identity: what passes the channel comes out the same, and nothing else passes."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.identity.authority import Authority
from infranetes_common import identity
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Identity, Neighbour, Network, Route

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIBdTCCARugAwIBAgIU\nSECRET==\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nSECRET==\n-----END PRIVATE KEY-----\n"
NETWORK = Network(mac="02:00:00:00:00:07", address="10.88.0.7/16", gateway="10.88.0.1")
GOOD = Identity(
    sandbox_id="0123456789abcdef" * 2,
    certificate_pem=CERTIFICATE,
    key_pem=KEY,
    ca_pem=CERTIFICATE,
    listen="0.0.0.0:2475",
    hostname="web-0.web.default",
    machine_id="0123456789abcdef" * 2,
    entropy="00ff" * 32,
    now_nanos=1_772_000_000_000_000_000,
    network=NETWORK,
)


ROUTED = Network(
    mac="02:00:00:00:00:07",
    address="10.4.0.7/32",
    gateway="",
    routes=(
        Route("169.254.1.1/32"),
        Route("0.0.0.0/0", "169.254.1.1", "10.4.0.7", 1450, onlink=True),
        Route("::/0", "fe80::1"),
    ),
    more=("fd00:4::7/128", "10.4.0.8/32"),
    neighbours=(Neighbour("169.254.1.1", "ee:ee:ee:ee:ee:ee"),),
)


def document(**fields: Any) -> bytes:
    """GOOD with some fields otherwise; "network.mac" is a field of its network, None leaves one out."""
    whole = json.loads(identity.encode(GOOD))
    for name, value in fields.items():
        table, _, key = name.rpartition(".")
        (whole[table] if table else whole)[key] = value
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


class PassingTests(SynchronousTestCase):
    def test_it_comes_out_as_it_went_in(self) -> None:
        for each in (GOOD, attrs.evolve(GOOD, network=None), attrs.evolve(GOOD, hostname="", machine_id="")):
            self.assertEqual(identity.decode(identity.encode(each)), each)

    def test_a_network_of_somebody_elses_comes_out_as_it_went_in(self) -> None:
        whole = attrs.evolve(GOOD, network=ROUTED)
        self.assertEqual(identity.decode(identity.encode(whole)), whole)

    def test_older_agents_understand_what_needs_nothing_new(self) -> None:
        network = json.loads(identity.encode(GOOD))["network"]
        self.assertEqual(set(network), {"mac", "address", "gateway", "mtu"})

    def test_it_is_one_line(self) -> None:
        self.assertEqual(identity.encode(GOOD).count(b"\n"), 1)
        self.assertTrue(identity.encode(GOOD).endswith(b"\n"))

    def test_what_the_nodes_authority_issues_passes(self) -> None:
        authority = Authority(self.mktemp())
        certificate, key = authority.issue_vm("ab" * 16, 3600)
        issued = Identity("ab" * 16, certificate, key, authority.ca_pem)
        self.assertEqual(identity.decode(identity.encode(issued)), issued)

    def test_other_forms_that_are_right(self) -> None:
        for fields in (
            {"listen": "[::]:2475"},
            {"listen": "127.0.0.1:0"},
            {"ca_pem": CERTIFICATE * 2},
            {"certificate_pem": CERTIFICATE.rstrip("\n")},
            {"key_pem": KEY.replace("PRIVATE", "EC PRIVATE")},
            {"network.address": "10.88.0.7/31", "network.gateway": "10.88.0.6"},
            {"network.mtu": 9000},
        ):
            identity.decode(document(**fields))

    def test_its_secrets_are_in_no_repr(self) -> None:
        self.assertNotIn("PRIVATE KEY", repr(GOOD))
        self.assertNotIn("00ff00ff", repr(GOOD))


class RefusedTests(SynchronousTestCase):
    def refused(self, blob: bytes) -> str:
        words = str(self.assertRaises(InvalidArgument, identity.decode, blob))
        self.assertNotIn("SECRET", words)
        self.assertNotIn("evil", words)
        return words

    def test_a_field_of_another_form_is_named(self) -> None:
        wrong: dict[str, tuple[object, ...]] = {
            "sandbox_id": ("../evil", "evil.b", "-evil", "a" * 64, "evil\n", "é", 5),
            "certificate_pem": (
                "evil",
                KEY,
                f"evil\n{CERTIFICATE}",
                f"{CERTIFICATE}evil",
                CERTIFICATE * 9,
                5,
            ),
            "key_pem": (
                CERTIFICATE,
                KEY * 2,
                KEY.replace("\n", "\r\n"),
                KEY.replace("MIG", "M" * 77),
                KEY.replace("MIG", "MIG\n" * 5_000),
                [KEY],
            ),
            "ca_pem": ("evil", KEY, {"evil": 1}, True),
            "listen": (
                "evil:80",
                "0.0.0.0",
                "0.0.0.0:65536",
                ":1",
                "::1:80",
                "[fe80::1%evil]:1",
                "1.2.3.4:+1",
                1,
            ),
            "hostname": ("evil;reboot", "evil\n127.0.0.1 x", "a" * 64, "a." * 33, "a..b", ".", "-evil", 7),
            "machine_id": ("0" * 32, "g" * 32, "A" * 32, "ab", "ab" * 16 + "\n", 5),
            "entropy": ("f", "xx", "00" * 2049, 5),
            "now_nanos": (-1, 2**63, 1.5, True, "5", None, [5]),
            "network.mac": ("evil", "01:00:00:00:00:07", "00:00:00:00:00:00", "02-00-00-00-00-07", 5, None),
            "network.address": (
                "evil",
                "10.0.0.7",
                "10.0.0.7/33",
                "10.0.0.0/16",
                "10.0.255.255/16",
                "::1/64",
                5,
            ),
            "network.gateway": ("evil", "10.88.0.7", "10.88.255.255", "192.168.0.1", "::1", "", 5, None),
            "network.mtu": (575, 65536, "1500", 1500.0, True, None),
        }
        for name, values in wrong.items():
            for value in values:
                if name == "now_nanos" and value is None:
                    continue  # left out, it has a default
                words = self.refused(document(**{name: value}))
                self.assertIn(f"the identity's {name} is not", words, repr((name, value))[:90])

    def test_routes_addresses_and_neighbours_are_checked(self) -> None:
        good = {"to": "10.0.0.0/8"}
        wrong: dict[str, tuple[object, ...]] = {
            "network.routes": (
                [{"to": "10.0.0.0/8 dev lo"}],
                [{"to": "10.0.0.7"}],
                [{"to": "10.0.0.7/8"}],
                [{"to": 5}],
                [{"to": "default"}],
                [{**good, "via": "::1"}],
                [{**good, "via": "fe80::1"}],
                [{**good, "via": "224.0.0.1"}],
                [{**good, "via": 5}],
                [{**good, "source": "fd00::1"}],
                [{**good, "mtu": 5}],
                [{**good, "mtu": True}],
                [{**good, "onlink": True}],
                [{**good, "via": "10.0.0.1", "onlink": 1}],
            ),
            "network.more": (
                ["10.0.0.7"],
                ["fe80::1%x/64"],
                ["10.0.0.7/33"],
                ["10.0.0.7/ 8"],
                [5],
                ["evil/8"],
            ),
            "network.neighbours": (
                [{"address": "evil", "mac": "02:00:00:00:00:01"}],
                [{"address": "10.0.0.1", "mac": "01:00:00:00:00:01"}],
                [{"address": "10.0.0.1", "mac": 5}],
            ),
        }
        for name, values in wrong.items():
            for value in values:
                words = self.refused(document(**{name: value}))
                self.assertIn(f"the identity's {name} are not all", words, repr(value))
        for name, entry in (("routes", good), ("more", "10.0.0.9/8")):
            for lists in (
                [entry] * 65,
                {"0": entry},
                "evil",
                [["evil"]] if name == "routes" else 5,
                [None] * 70,
            ):
                words = self.refused(document(**{f"network.{name}": lists}))
                self.assertIn("is not the JSON object that the node writes", words)

    def test_addresses_that_no_machine_has(self) -> None:
        for address, gateway in (
            ("127.0.0.7/8", "127.0.0.1"),
            ("224.0.0.7/8", "224.0.0.1"),
            ("240.0.0.7/8", "240.0.0.1"),
        ):
            words = self.refused(document(**{"network.address": address, "network.gateway": gateway}))
            self.assertIn("not one that a machine can have", words)

    def test_what_is_missing_is_told(self) -> None:
        for name in ("certificate_pem", "key_pem", "ca_pem", "sandbox_id"):
            self.assertIn(
                "lacks the sandbox id, certificate, key or CA", self.refused(document(**{name: ""}))
            )
            self.assertIn("is not the JSON object", self.refused(document(**{name: None})))

    def test_what_is_no_such_object(self) -> None:
        for blob in (
            b"",
            b"evil",
            b"[]",
            b"null",
            b'"evil"',
            b"[" * 60_000,
            b'{"a":' * 10_000,
            b"\xff\xfe",
            json.dumps("evil").encode("utf-16"),
            b'{"now_nanos": ' + b"9" * 5000 + b"}",
            document(evil=1),
            document(network=[]),
            document(network="evil"),
            document(**{"network.evil": 1}),
        ):
            self.assertIn("is not the JSON object that the node writes", self.refused(blob))

    def test_what_is_too_long_is_not_read(self) -> None:
        self.assertIn("over 65536 bytes", self.refused(b" " * 65_537))

    def test_the_node_does_not_send_what_the_agent_would_refuse(self) -> None:
        error = self.assertRaises(InvalidArgument, identity.encode, attrs.evolve(GOOD, hostname="a b"))
        self.assertEqual(str(error), "the identity's hostname is not a DNS name of at most 64 characters")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        *(attribute.name for attribute in attrs.fields(Identity)),
        *(f"network.{attribute.name}" for attribute in attrs.fields(Network)),
    ]
)


class AnythingTests(SynchronousTestCase):
    @given(st.binary(max_size=200))
    def test_any_bytes_are_refused_in_words(self, blob: bytes) -> None:
        self.assertRaises(InvalidArgument, identity.decode, blob)

    @given(NAMES, JSON)
    def test_any_value_is_refused_or_harmless(self, name: str, value: Any) -> None:
        try:
            decoded = identity.decode(document(**{name: value}))
        except InvalidArgument:
            return
        table, _, key = name.rpartition(".")
        taken = getattr(decoded.network if table else decoded, key)
        if isinstance(taken, str):
            self.assertNotRegex(taken, r"[^\n0-9A-Za-z:./\[\]+= -]")
        self.assertEqual(identity.decode(identity.encode(decoded)), decoded)

    @given(
        st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
        st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True),
        st.ip_addresses(v=4, network="10.0.0.0/8"),
        st.integers(8, 29),
    )
    def test_every_right_identity_passes(self, sandbox: str, host: str, address: Any, prefix: int) -> None:
        subnet = ipaddress.IPv4Interface(f"{address}/{prefix}").network
        network = Network("02:00:00:00:00:01", f"{subnet[2]}/{prefix}", str(subnet[1]))
        whole = attrs.evolve(GOOD, sandbox_id=sandbox, hostname=host, network=network)
        self.assertEqual(identity.decode(identity.encode(whole)), whole)
