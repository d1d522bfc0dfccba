# SPDX-License-Identifier: Apache-2.0
"""Recordings contain only what is known to be harmless, and comparing them names what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.size_choices import SizeOnOffer
from infranetes_common.errors import FailedPrecondition
from tests.harness.needs import tool
from tests.support.clouds.recordings import libclouds, wire
from tests.support.clouds.recordings.bill import Bill
from tests.support.clouds.recordings.compare import lacking
from tests.support.clouds.recordings.recording import Recorder, Recording, condensed, read, unknown_texts
from tests.support.clouds.recordings.scrub import Scrubber, form_of
from tests.support.clouds.recordings.vocabulary import OWN, vocabulary
from tests.support.clouds.recordings.wire import AWS, GCP, JSON, XML, Call, Exchange

NEEDS = (tool("wheels"),)

# One of each kind, in a realistic form.
SECRETS = {
    "account": "123456789012",
    "key": "AKIAIOSFODNN7EXAMPLE",
    "secret": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "token": "ya29.c.b0AXv0zTPz",
    "private": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "user": "jane.doe@example.org",
    "project": "payroll-prod-7781",
    "host": "db1.corp.example.org",
    "address": "203.0.113.77",
    "address6": "2a00:1450:4001:82b::200e",
    "mac": "0a:1b:2c:3d:4e:5f",
    "vm": "i-0f1e2d3c4b5a69788",
    "date": "2031-07-19T23:58:41.317Z",
    "word": "Zanzibar",
}
_EC2 = """<?xml version="1.0" encoding="UTF-8"?>
<DescribeInstancesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<requestId>{secret}</requestId><reservationSet><item><ownerId>{account}</ownerId><instancesSet><item>
<instanceId>{vm}</instanceId><instanceState><code>16</code><name>running</name></instanceState>
<privateDnsName>{host}</privateDnsName><dnsName/><ipAddress>{address}</ipAddress><reason>{word}</reason>
<instanceType>{word}</instanceType><architecture>x86_64</architecture><launchTime>{date}</launchTime>
<tagSet><item><key>{user}</key><value>{private}</value></item><item><key>infranetes-node</key><value>{host}
</value></item></tagSet><{word}>{key}</{word}><ebsOptimized>false</ebsOptimized><macAddress>{mac}</macAddress>
<ipv6Address>{address6}</ipv6Address><iops>{account}</iops><hibernationState>{word}</hibernationState>
</item></instancesSet></item></reservationSet></DescribeInstancesResponse>"""
_REFUSED = """<Response><Errors><Error><Code>{code}</Code><Message>You are not authorized: {user} {account}
</Message></Error></Errors><RequestID>{secret}</RequestID></Response>"""


def _form(**secrets: str) -> str:
    fields = {
        "Action": "DescribeInstances",
        "Version": "2016-11-15",
        "Filter.1.Name": "tag:" + secrets["user"],
        "Filter.1.Value.1": secrets["project"],
        "UserData": secrets["private"],
        secrets["word"]: secrets["key"],
        f"Tag.1.{secrets['key']}": "x",
    }
    return urlencode(fields)


def _google(**secrets: str) -> dict[str, Any]:
    link = f"https://www.googleapis.com/compute/v1/projects/{secrets['project']}/zones/{secrets['host']}"
    return {
        "kind": "compute#instance",
        "id": secrets["account"],
        "name": secrets["project"],
        "status": "RUNNING",
        "selfLink": link,
        "zone": link,
        "creationTimestamp": secrets["date"],
        "labels": {"infranetes-node": secrets["project"], secrets["word"].lower(): secrets["word"]},
        "metadata": {"items": [{"key": secrets["host"], "value": secrets["private"]}]},
        "serviceAccounts": [{"email": secrets["user"], "scopes": [secrets["token"]]}],
        "networkInterfaces": [{"networkIP": secrets["address"], "ipv6Address": secrets["address6"]}],
        "fingerprint": secrets["secret"],
        "canIpForward": False,
        "projectNumber": int(secrets["account"]),
        "cpuPlatform": secrets["word"],
        secrets["key"]: secrets["key"],
    }


def _exchange(
    body: str | Mapping[str, Any], sent: str = "Action=RunInstances", status: int = 200
) -> Exchange:
    if isinstance(body, str):
        return Exchange(
            "POST", "https://ec2.example.org/", sent, status, f"{XML};charset=UTF-8", body.encode()
        )
    url = f"https://compute.googleapis.com/compute/v1/projects/{SECRETS['project']}/zones/z/instances/vm"
    query = f"?filter={SECRETS['word']}&{SECRETS['word']}=1"
    return Exchange("GET", url + query, sent, status, JSON, json.dumps(body).encode())


class ScrubTests(SynchronousTestCase):
    """Of the planted secrets, nothing survives."""

    def written(self, cloud: str, *exchanges: Exchange) -> str:
        """Return the file of a recording of these."""
        path = Path(self.mktemp())
        recorder = Recorder(cloud, path)
        for exchange in exchanges:
            recorder.hear(exchange)
        recorder.close()
        self.assertEqual((recorder.failures, recorder.written), (set(), len(exchanges)))
        self.assertEqual(len(read(path).calls), len(exchanges))
        return path.read_text()

    def assertNothingSurvives(self, text: str) -> None:
        survivors = [name for name, secret in SECRETS.items() if secret.lower() in text.lower()]
        self.assertEqual(survivors, [])

    def test_in_ec2s_answers_and_what_they_are_asked_for(self) -> None:
        text = self.written(
            AWS,
            _exchange(_EC2.format(**SECRETS), _form(**SECRETS)),
            _exchange(_REFUSED.format(code="UnauthorizedOperation", **SECRETS), status=403),
            *(_exchange(_REFUSED.format(code=secret, **SECRETS), status=400) for secret in SECRETS.values()),
            _exchange(f"<html>{SECRETS['host']}", status=502),
        )
        self.assertNothingSurvives(text)
        for harmless in (
            '"running"',
            '"x86_64"',
            '"16"',
            '"UnauthorizedOperation"',
            '"infranetes-node"',
            "403",
        ):
            self.assertIn(harmless, text)

    def test_in_googles_answers_and_what_they_are_asked_for(self) -> None:
        refusal = {"errors": [{"reason": SECRETS["word"], "message": SECRETS["user"]}], "code": 403}
        text = self.written(
            GCP,
            _exchange(_google(**SECRETS), json.dumps(_google(**SECRETS))),
            _exchange({"error": {**refusal, "message": SECRETS["project"]}}, status=403),
            _exchange({"error": {"errors": [{"reason": "notFound"}], "code": 404}}, status=404),
        )
        self.assertNothingSurvives(text)
        for harmless in ('"RUNNING"', '"compute.instances.get"', '"notFound"', '"infranetes-node"', "404"):
            self.assertIn(harmless, text)

    @given(
        st.sampled_from((AWS, GCP)),
        st.sampled_from(sorted(SECRETS.values())),
        st.lists(st.sampled_from(("status", "key", "name", "code", "size", "id", "labels", 0)), max_size=5),
        st.sampled_from(
            (
                "{}",
                "x{}",
                "{}.1",
                "Tag.{}",
                "Tag.1.{}",
                "tag:{}",
                "arn:aws:iam::{}:role",
                "https://x.example/{}",
            )
        ),
        st.booleans(),
    )
    def test_wherever_it_is(self, cloud: str, secret: str, path: list[Any], around: str, named: bool) -> None:
        """As a value or as a name, alone or within a text, below any of the fields of both APIs."""
        value: Any = {around.format(secret): "x"} if named else around.format(secret)
        for step in path:
            value = [value] if step == 0 else {step: value}
        scrubbed = Scrubber(vocabulary(cloud)).value("", value)
        self.assertNotIn(secret.lower(), json.dumps(scrubbed).lower())
        numbers: Any = int(SECRETS["account"])
        self.assertEqual(Scrubber(vocabulary(cloud)).value("code", numbers), 0)

    @given(st.text(alphabet=st.characters(max_codepoint=127), min_size=8, max_size=40))
    def test_what_no_api_has_is_no_name_and_no_code(self, text: str) -> None:
        mixed = f"q{text}7z"  # no word of the API looks like this
        for cloud in (AWS, GCP):
            self.assertFalse(vocabulary(cloud).is_name(mixed))
            self.assertFalse(vocabulary(cloud).is_value("code", mixed))

    def test_the_same_thing_has_the_same_placeholder_of_its_own_form(self) -> None:
        scrubber = Scrubber(vocabulary(AWS))
        for secret in SECRETS.values():
            once = scrubber.value("x", secret)
            self.assertNotEqual(once, secret)
            self.assertEqual(scrubber.value("y", [secret]), [once])
            self.assertEqual(form_of(str(once)), form_of(secret))
        others = [scrubber.value("x", f"i-012345{number}") for number in range(10, 12)]
        self.assertEqual(others, ["i-00000002", "i-00000003"])

    def test_other_services_are_not_recorded(self) -> None:
        token = json.dumps({"access_token": SECRETS["token"]}).encode()
        for cloud, url in (
            (GCP, "https://accounts.google.com/o/oauth2/token"),
            (AWS, "https://api.pricing.us-east-1.amazonaws.com/"),
        ):
            path = Path(self.mktemp())
            recorder = Recorder(cloud, path)
            recorder.hear(Exchange("POST", url, json.dumps({"ServiceCode": "x"}), 200, JSON, token))
            recorder.close()
            self.assertEqual((recorder.written, recorder.failures), (0, set()))
            self.assertNotIn(SECRETS["token"], path.read_text())

    def test_a_call_that_cannot_be_recorded_does_not_fail(self) -> None:
        recorder = Recorder(AWS, Path(self.mktemp()))
        recorder.close()
        recorder.hear(_exchange(_EC2.format(**SECRETS)))
        self.assertEqual(recorder.failures, {"ValueError"})

    def test_texts_that_are_not_the_apis_are_found(self) -> None:
        """A session uses this to check that nothing of its configuration is left."""
        left = Call("RunInstances", {"Tag.1.Value": "mine"}, 200, XML, {"status": "attached", "Zanzibar": 1})
        self.assertEqual(list(unknown_texts(Recording(AWS, [left]))), ["mine", "Zanzibar"])

    def test_long_lists_keep_what_looks_different(self) -> None:
        alike: list[wire.Value] = [{"name": f"t{number}"} for number in range(50)]
        self.assertEqual(
            condensed([*alike, {"name": "x", "gpu": 1}]), [{"name": "t0"}, {"name": "x", "gpu": 1}]
        )
        self.assertEqual(condensed(alike[:3]), alike[:3])

    def test_our_own_tags_are_no_secrets(self) -> None:
        scrubbed = Scrubber(vocabulary(GCP)).value("labels", {name: "x" for name in OWN})
        assert isinstance(scrubbed, dict)
        self.assertEqual(set(scrubbed), OWN)


class CompareTests(SynchronousTestCase):
    """What is in a recording and not in its simulator is named."""

    def volumes(self, *states: str, **fields: wire.Value) -> list[Call]:
        """Return the calls of a volume's life through these states, with these additional fields."""
        calls = []
        for state in states:
            volume: wire.Value = {"volumeId": "vol-00000001", "size": "1", "status": state, **fields}
            answer: wire.Value = {"DescribeVolumesResponse": {"volumeSet": [volume]}}
            calls.append(Call("DescribeVolumes", None, 200, XML, answer))
        return calls

    def refused(self, code: str, status: int = 400, kind: str = "DescribeVolumes") -> Call:
        error: wire.Value = {"Code": code, "Message": "text-1"}
        answer: wire.Value = {"Response": {"Errors": {"Error": error}, "RequestID": "text-2"}}
        return Call(kind, None, status, XML, answer)

    def assertLacking(self, recorded: list[Call], simulated: list[Call], *expected: str) -> None:
        self.assertEqual(lacking(Recording(AWS, recorded), Recording(AWS, simulated)), sorted(expected))

    def test_nothing(self) -> None:
        calls = [*self.volumes("creating", "available"), self.refused("InvalidVolume.NotFound")]
        self.assertLacking(calls, calls)
        self.assertLacking(calls[:1], calls)

    def test_a_field_and_not_all_that_is_in_it(self) -> None:
        more = self.volumes("available", operator={"managed": "false", "principal": "text-1"})
        self.assertLacking(
            more,
            self.volumes("available"),
            "DescribeVolumesResponse: volumeSet[].operator: lacking (fields)",
        )

    def test_a_value_of_another_form(self) -> None:
        self.assertLacking(
            self.volumes("available", iops="3000", tagSet=[{"key": "text-1"}], snapshotId=""),
            self.volumes("available", iops="text-1", tagSet="", snapshotId="text-1"),
            "DescribeVolumesResponse: volumeSet[].iops: number, not text",
            "DescribeVolumesResponse: volumeSet[].tagSet: always empty (a list)",
        )

    def test_an_error_and_its_status(self) -> None:
        known = [*self.volumes("available"), self.refused("InvalidVolume.NotFound")]
        self.assertLacking(
            [self.refused("InvalidVolume.NotFound", 404), self.refused("IncorrectState")],
            known,
            "DescribeVolumes: 404 InvalidVolume.NotFound: no such answer",
            "DescribeVolumes: 400 IncorrectState: no such answer",
        )

    def test_refusals_that_may_befall_any_call_are_like_others(self) -> None:
        known = [*self.volumes("available"), self.refused("InvalidVolume.NotFound")]
        self.assertLacking([self.refused("RequestLimitExceeded", 503)], known)
        bare = Call("DescribeVolumes", None, 503, XML, {"html": "text-1"})
        self.assertLacking([bare], known, "an error: the answer: text, not fields")

    def test_what_is_not_asked(self) -> None:
        asked = [self.refused("InvalidVolume.NotFound", kind="DeleteVolume")]
        self.assertLacking(asked, self.volumes("available"), "DeleteVolume: the simulator is not asked")

    def test_another_type_of_content(self) -> None:
        [plain] = self.volumes("available")
        self.assertLacking(
            [attrs.evolve(plain, content_type="")],
            [plain],
            "DescribeVolumes: 200: neither XML nor JSON, not text/xml",
        )

    def test_states_and_their_order(self) -> None:
        self.assertLacking(
            self.volumes("creating", "available", "deleting"),
            self.volumes("available", "creating"),
            "volume: available before creating, not after it",
            "volume: never deleting",
        )
        self.assertLacking(self.volumes("creating", "available"), self.volumes("creating", "available"))
        self.assertLacking(  # it went there and back
            self.volumes("available", "in-use", "available"), self.volumes("in-use", "available")
        )
        self.assertLacking(  # one that was missed
            self.volumes("creating", "deleting"), self.volumes("creating", "available", "deleting")
        )

    def test_resources_of_googles_wherever_they_are(self) -> None:
        disk: dict[str, wire.Value] = {"kind": "compute#disk", "id": "1", "status": "READY", "sizeGb": "10"}
        listed: wire.Value = {"kind": "compute#diskList", "items": [{**disk, "provisionedIops": "1"}]}
        of_list = Call("compute.disks.list", None, 200, JSON, listed)
        of_one = Call("compute.disks.get", None, 200, JSON, disk)
        found = lacking(Recording(GCP, [of_list]), Recording(GCP, [of_one]))
        self.assertEqual(
            found,
            [
                "compute#disk: provisionedIops: lacking (number)",
                "compute.disks.list: the simulator is not asked",
            ],
        )

    def test_libclouds_own_recordings_are_read(self) -> None:
        for cloud, least in ((AWS, 80), (GCP, 280)):
            found = libclouds.recording(cloud)
            self.assertGreater(len(found.calls), least)
            self.assertFalse(found.of_life)


class BillTests(SynchronousTestCase):
    """The bill is for the most expensive size that may be tried, for the whole time."""

    def sizes(self, *prices: float | None) -> tuple[SizeOnOffer, ...]:
        return tuple(
            SizeOnOffer(f"t{number}", 1000, 0, 1 << 30, 0, "x86_64", price, "EC2")
            for number, price in enumerate(prices)
        )

    def test_it_is_at_most_what_the_dearest_size_costs(self) -> None:
        found = Bill(self.sizes(0.5, 4.0), "USD", 900.0)
        self.assertEqual(found.most, 1.0)
        found.check(1.0)
        words = found.words("aws eu-west-1", 2)
        for part in ("t0 at 0.5 USD", "t1", "15 minutes", "1.0000 USD", "2 GiB"):
            self.assertIn(part, words)

    def test_more_than_the_budget_is_refused(self) -> None:
        refused = self.assertRaises(FailedPrecondition, Bill(self.sizes(4.0), "USD", 900.0).check, 0.99)
        self.assertIn("1.0000 USD", str(refused))

    def test_a_price_that_nobody_knows_is_refused(self) -> None:
        for prices in ((0.5, None), ()):
            self.assertRaises(FailedPrecondition, Bill(self.sizes(*prices), "USD", 900.0).check, 1000.0)
