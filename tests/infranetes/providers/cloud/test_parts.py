# SPDX-License-Identifier: Apache-2.0
"""Parts that need no cloud: rate limits, circuit breakers, sizes, the ledger, errors, EC2 settings."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import requests
from hypothesis import given
from hypothesis import strategies as st
from libcloud.common.exceptions import exception_from_message
from libcloud.common.types import InvalidCredsError, MalformedResponseError
from twisted.internet.defer import succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import registry
from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.aws import errors
from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.aws.burstable import lasting_millis
from infranetes.providers.cloud.aws.cloud import AwsCloud
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.offers import AwsOffers
from infranetes.providers.cloud.aws.quotas import quota_of
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.calls.throttle import CircuitBreaker, RateLimit
from infranetes.providers.cloud.interface import Cloud, CloudVM, ErrorKind, Offer
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.offers.sizes import choose, estimated_prices, need_of
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.boots import Boots
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.interface import InstanceState, ProviderContext, Size
from infranetes_common import config
from infranetes_common.concurrency import start
from infranetes_common.errors import ConfigError, InvalidArgument, Unavailable
from tests.support.clouds import sigv4

TREE = Path(__file__).resolve().parents[4]
GIB = 1 << 30
CONTEXT = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "c", "n")


class RateLimitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.limit = RateLimit(self.clock.seconds, rate=10.0, burst=5.0, chance=lambda: 0.5)

    def test_a_burst_is_free_and_further_calls_are_spread(self) -> None:
        for _ in range(5):
            self.assertEqual(self.limit.wait(), 0.0)
            self.limit.take()
        for before in range(10):
            self.assertAlmostEqual(self.limit.wait(before), (before + 1) / 10)
        self.clock.advance(2.0)
        self.assertEqual(self.limit.wait(), 0.0)
        self.assertAlmostEqual(self.limit.wait(5), 0.1)

    def test_throttling_slows_down_and_time_restores_the_rate(self) -> None:
        self.limit.throttled(0)
        self.assertAlmostEqual(self.limit.current, 7.0)
        for _ in range(20):
            self.limit.throttled(0)
        self.assertAlmostEqual(self.limit.current, 1.0)
        self.clock.advance(2.0)
        self.assertAlmostEqual(self.limit.current, 5.0)
        self.clock.advance(100.0)
        self.assertEqual(self.limit.current, 10.0)

    def test_after_throttling_nodes_come_back_one_by_one(self) -> None:
        waits = []
        for chance in (0.0, 1.0):
            limit = RateLimit(self.clock.seconds, rate=10.0, burst=5.0, chance=partial(float, chance))
            limit.throttled(0)
            waits.append(limit.wait())
        self.assertGreater(waits[1], waits[0])

    def test_nothing_is_saved_up_in_a_pause(self) -> None:
        self.limit.throttled(60.0)
        self.clock.advance(60.0)
        self.assertAlmostEqual(self.limit.wait(), 0.1)
        self.clock.advance(0.2)
        self.assertAlmostEqual(self.limit.wait(4), 0.3)

    def test_retry_after_is_honoured(self) -> None:
        self.limit.throttled(7.0)
        self.assertGreaterEqual(self.limit.wait(), 7.0)
        self.clock.advance(4.0)
        self.assertGreaterEqual(self.limit.wait(), 3.0)


class CircuitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.circuit = CircuitBreaker(self.clock.seconds, threshold=3, first=5.0, longest=20.0)

    def fail_often(self) -> None:
        for _ in range(3):
            self.assertEqual(self.circuit.wait(), 0.0)
            self.circuit.failed()

    def test_it_opens_after_failures_in_a_row_only(self) -> None:
        for _ in range(10):
            self.circuit.failed()
            self.circuit.failed()
            self.circuit.succeeded()
        self.assertFalse(self.circuit.is_open)
        self.fail_often()
        self.assertTrue(self.circuit.is_open)
        self.assertEqual(self.circuit.wait(), 5.0)

    def test_one_call_probes_and_closes_it(self) -> None:
        self.fail_often()
        self.clock.advance(5.0)
        self.assertEqual(self.circuit.wait(), 0.0)
        self.assertGreater(self.circuit.wait(), 0.0)  # others wait for the probe
        self.circuit.succeeded()
        self.assertEqual(self.circuit.wait(), 0.0)

    def test_each_failed_probe_doubles_the_pause_up_to_the_longest(self) -> None:
        self.fail_often()
        for pause in (10.0, 20.0, 20.0):
            self.clock.advance(self.circuit.wait())
            self.assertEqual(self.circuit.wait(), 0.0)
            self.circuit.failed()
            self.assertEqual(self.circuit.wait(), pause)

    def test_an_abandoned_probe_is_left_to_the_next_call(self) -> None:
        self.fail_often()
        self.clock.advance(5.0)
        self.circuit.wait()
        self.circuit.abandoned()
        self.assertEqual(self.circuit.wait(), 0.0)


OFFERS = (
    Offer("a.small", 1000, 1 * GIB, 0.01),
    Offer("a.large", 2000, 4 * GIB, 0.04),
    Offer("b.large", 2000, 4 * GIB, 0.03),
    Offer("c.huge", 8000, 64 * GIB, None),
    Offer("g.gpu", 8000, 64 * GIB, 1.0, gpus=2),
    Offer("r.arm", 1000, 2 * GIB, 0.001, architecture="arm64"),
)


class SizeTests(SynchronousTestCase):
    def names(self, size: Size, wishes: Wishes = Wishes(), allowed: Any = ()) -> list[str]:  # noqa: B008
        need = need_of(size, wishes, allowed=allowed, guest_memory=256 << 20, architecture="x86_64")
        return [one.name for one in choose(OFFERS, need)]

    def test_cheapest_first_and_without_a_price_last(self) -> None:
        self.assertEqual(self.names(Size()), ["a.small", "b.large", "a.large", "c.huge"])
        huge = Size(memory_bytes=GIB, huge_bytes=40 * GIB)
        self.assertEqual(self.names(huge), ["c.huge"])
        self.assertEqual(self.names(Size(cpu_millis=1001)), ["b.large", "a.large", "c.huge"])

    def test_the_guest_needs_memory_too(self) -> None:
        self.assertEqual(self.names(Size(memory_bytes=1 * GIB))[0], "b.large")

    def test_a_pods_overhead_is_for_the_guest_and_counted_once(self) -> None:
        for overhead, first in ((0, "a.small"), (256, "a.small"), (512, "a.small"), (513, "b.large")):
            size = Size(memory_bytes=GIB // 2, overhead_bytes=overhead << 20)
            self.assertEqual(self.names(size)[0], first, overhead)

    def test_a_vm_has_a_least_memory_unless_its_size_is_named(self) -> None:
        needed = partial(need_of, allowed=(), guest_memory=256 << 20, architecture="x86_64")
        for least, asked, first in (
            (GIB, 0, "a.small"),
            (GIB + 1, 0, "b.large"),
            (2 * GIB, GIB // 2, "b.large"),
            (2 * GIB, 8 * GIB, "c.huge"),
        ):
            [found, *_] = choose(OFFERS, needed(Size(memory_bytes=asked), Wishes(), min_memory=least))
            self.assertEqual(found.name, first, (least, asked))
        [named] = choose(OFFERS, needed(Size(), Wishes(instance_type="a.small"), min_memory=8 * GIB))
        self.assertEqual(named.name, "a.small")

    def test_only_allowed_sizes_are_chosen(self) -> None:
        self.assertEqual(self.names(Size(), allowed=("b.*", "c.hug?")), ["b.large", "c.huge"])
        for wishes, size in ((Wishes(), Size(cpu_millis=9000)), (Wishes(instance_type="a.small"), Size())):
            self.assertRaises(InvalidArgument, self.names, size, wishes, ("b.*",))

    def test_a_pod_may_choose_a_size(self) -> None:
        self.assertEqual(self.names(Size(cpu_millis=9000), Wishes(instance_type="a.small")), ["a.small"])

    def test_gpus_only_where_they_are_asked_for(self) -> None:
        self.assertEqual(self.names(Size(), Wishes(gpus=1)), ["g.gpu"])
        self.assertRaises(InvalidArgument, self.names, Size(), Wishes(gpus=3))

    def test_a_gap_in_the_list_of_prices_is_filled_from_the_family(self) -> None:
        family = (Offer("t.small", 1000, GIB, 0.02), Offer("t.large", 2000, 4 * GIB))
        self.assertEqual(estimated_prices(family), {"t.small": 0.02, "t.large": 0.08})

    def test_burstable_types_count_with_the_part_of_their_cpus_that_lasts(self) -> None:
        found = {one.name: one for one in offers("eu-west-1")}
        for name, millis, vcpus in (
            ("t2.nano", 50, 1),
            ("t2.2xlarge", 1360, 8),
            ("t3.nano", 100, 2),
            ("t3a.medium", 400, 2),
            ("t4g.xlarge", 1600, 4),
            ("m5.large", 2000, 0),
        ):
            self.assertEqual((found[name].cpu_millis, found[name].shared_cpus), (millis, vcpus), name)
        self.assertEqual(lasting_millis("t9.large", 2), 100)  # newer than the table

    def test_types_of_ec2_that_share_a_limit_of_vcpus(self) -> None:
        found = {one.name: one.quota for one in offers("eu-west-1")}
        for names, quota in (
            (("t3.nano", "m5.large", "c5.large", "r5.large", "i3.large", "im4gn.large"), "Standard"),
            (("g4dn.xlarge", "g5.xlarge"), "G and VT"),
            (("p3.2xlarge",), "P"),
            (("inf1.xlarge",), "Inf"),
            (("x1e.xlarge", "x2idn.16xlarge"), "X"),
            (("u-6tb1.metal",), "High Memory"),
        ):
            for name in names:
                self.assertEqual(found.get(name, quota_of(name)), quota, name)

    @given(st.integers(0, 200_000), st.integers(0, 2000))
    def test_chosen_sizes_of_ec2_fit(self, cpu: int, gib: int) -> None:
        size = Size(cpu, gib * GIB)
        try:
            need = need_of(size, Wishes(), allowed=(), guest_memory=0, architecture="x86_64")
            found = choose(offers("eu-west-1"), need)
        except InvalidArgument:
            return
        for one in found:
            self.assertTrue(one.cpu_millis >= cpu and one.memory_bytes >= gib * GIB and not one.gpus)


class LedgerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger(self.clock.seconds, staleness=60.0)

    def found(self, id: str = "i-1", state: InstanceState = InstanceState.PENDING, **fields: Any) -> CloudVM:
        return CloudVM(id, fields.pop("token", "t"), "s", state, **fields)

    def test_a_state_never_goes_back(self) -> None:
        self.ledger.record(self.found(state=InstanceState.RUNNING, private_address="10.0.0.1"))
        after = self.ledger.record(self.found())
        self.assertEqual((after.state, after.private_address), (InstanceState.RUNNING, "10.0.0.1"))
        self.ledger.record(self.found(state=InstanceState.ENDED))
        self.assertIs(self.ledger.record(self.found(state=InstanceState.RUNNING)).state, InstanceState.ENDED)

    def test_a_new_vm_is_listed_before_the_cloud_lists_it(self) -> None:
        self.ledger.record_launch(self.found())
        self.assertEqual(len(self.ledger.record_list([])), 1)
        self.clock.advance(61.0)
        self.assertEqual(self.ledger.record_list([]), [])

    def test_a_destroyed_vm_is_not_listed_while_the_cloud_lists_it(self) -> None:
        self.ledger.record_launch(self.found())
        self.ledger.record_destroyed("i-1", "t")
        self.assertEqual(self.ledger.record_list([self.found(state=InstanceState.ENDED)]), [])
        self.assertEqual(self.ledger.count_destroyed("t"), 1)

    def test_a_destroyed_vm_that_stays_alive_for_long_is_listed_again(self) -> None:
        self.ledger.record_launch(self.found())
        self.ledger.record_destroyed("i-1", "t")
        alive = self.found(state=InstanceState.RUNNING)
        self.assertEqual(self.ledger.record_list([alive]), [])
        self.clock.advance(61.0)
        self.assertEqual(self.ledger.record_list([self.found(state=InstanceState.ENDED, gone=True)]), [])
        self.assertEqual(self.ledger.record_list([alive]), [alive])

    def test_a_destroyed_vm_is_ending_until_a_list_shows_that_it_is_gone(self) -> None:
        ended = self.found(state=InstanceState.ENDED)
        for gone in ([], [attrs.evolve(ended, gone=True)]):
            self.ledger.record_launch(self.found())
            self.ledger.record_destroyed("i-1", "t")
            self.clock.advance(59.0)
            self.assertEqual(self.ledger.record_list([ended]), [])
            self.assertEqual((self.ledger.ending, self.ledger.lasting), ({"i-1"}, set()))
            self.ledger.record_list(gone)
            self.clock.advance(60.0)
            self.assertEqual(self.ledger.record_list([ended]), [])
            self.assertEqual((self.ledger.ending, self.ledger.lasting), (set(), set()))

    def test_a_destroyed_vm_that_does_not_go_lasts_until_it_is_destroyed_again(self) -> None:
        stopped = self.found(state=InstanceState.ENDED)
        self.ledger.record_destroyed_before({"i-1": "t"})
        self.clock.advance(61.0)
        self.assertEqual(self.ledger.record_list([stopped]), [stopped])
        self.assertEqual(self.ledger.lasting, {"i-1"})
        self.ledger.record_destroyed("i-1", "t")
        self.assertEqual((self.ledger.ending, self.ledger.lasting), ({"i-1"}, set()))

    def test_of_two_vms_of_a_token_the_launched_one_is_kept(self) -> None:
        self.ledger.record(self.found("i-0", created_at=1.0))
        self.ledger.record_launch(self.found("i-1", created_at=2.0))
        self.ledger.record(self.found("i-2", created_at=0.0, token="other"))
        self.assertEqual([one.id for one in self.ledger.duplicates()], ["i-0"])


class BootTests(SynchronousTestCase):
    def test_of_a_console_the_end_is_told_without_half_of_a_secret(self) -> None:
        vm = CloudVM("i-1", "t", "s", InstanceState.ENDED, detail="it has crashed")
        console = "[1.0] booted\n" * 99 + f"curl /?token={'Planted' * 150} failed\n[2.0] halted"
        fake: Any = SimpleNamespace(
            call=lambda *_, **__: succeed(console),
            entries={vm.id: SimpleNamespace(vm=vm)},
            waiting=lambda id: nullcontext(lambda: succeed(None)),
            get=None,
            _thd_console_output=lambda driver, id: console,
        )
        boots = Boots(fake, CloudSettings(), fake, fake, fake.waiting, fake.get)
        error = self.failureResultOf(start(boots.wait_running(vm.id)), Unavailable)
        self.assertEqual(
            error.getErrorMessage(),
            "VM i-1 has ended: it has crashed; its console ends with: (hidden) failed\n[2.0] halted",
        )


class ErrorTests(SynchronousTestCase):
    def test_codes_of_ec2(self) -> None:
        for words, status, trouble in (
            ("RequestLimitExceeded: slow", 503, ErrorKind.THROTTLED),
            ("InternalError: oops", 500, ErrorKind.TRANSIENT),
            ("InsufficientInstanceCapacity: none", 500, ErrorKind.CAPACITY),
            ("Server.InsufficientInstanceCapacity: none", 500, ErrorKind.CAPACITY),
            ("VcpuLimitExceeded: none", 400, ErrorKind.FAMILY_QUOTA),
            ("MaxSpotInstanceCountExceeded: none", 400, ErrorKind.FAMILY_QUOTA),
            ("InstanceLimitExceeded: none", 400, ErrorKind.QUOTA),
            ("UnauthorizedOperation: no", 403, ErrorKind.CREDENTIALS),
            ("InvalidInstanceID.NotFound: which", 400, ErrorKind.NOT_FOUND),
            ("InvalidParameterValue: odd", 400, ErrorKind.INVALID),
        ):
            error = exception_from_message(status, words, {})
            self.assertIs((errors.classify(error) or classify(error)).kind, trouble, words)

    def test_errors_of_all_clouds(self) -> None:
        for error, trouble in (
            (exception_from_message(429, "slow", {"retry-after": "3"}), ErrorKind.THROTTLED),
            (exception_from_message(502, "gateway", {}), ErrorKind.TRANSIENT),
            (exception_from_message(403, "no", {}), ErrorKind.CREDENTIALS),
            (exception_from_message(404, "no", {}), ErrorKind.NOT_FOUND),
            (InvalidCredsError("no"), ErrorKind.CREDENTIALS),
            (MalformedResponseError("html", body="<html>"), ErrorKind.TRANSIENT),
            (requests.exceptions.ReadTimeout(), ErrorKind.TRANSIENT),
            (requests.exceptions.ConnectionError(), ErrorKind.TRANSIENT),
            (ConnectionResetError(), ErrorKind.TRANSIENT),
            (ValueError("a bug"), ErrorKind.UNEXPECTED),
        ):
            self.assertIs(classify(error).kind, trouble, repr(error))

    def test_retry_after_in_seconds_or_as_a_date(self) -> None:
        found = classify(exception_from_message(503, "", {"retry-after": "12"}))
        self.assertEqual(found.retry_after, 12.0)
        date = "Fri, 31 Dec 2199 23:59:59 GMT"
        self.assertEqual(classify(exception_from_message(503, "", {"retry-after": date})).retry_after, 300.0)


class AwsTests(SynchronousTestCase):
    settings = Settings(region="eu-west-1", image="ami-12345678")

    def test_it_is_a_cloud(self) -> None:
        cloud: Cloud[Driver] = AwsCloud(
            self.settings, CONTEXT, OfferBook(Path("/nonexistent"), AwsOffers(self.settings), {})
        )
        self.assertIsInstance(cloud, Cloud)

    def test_wrong_settings_are_named(self) -> None:
        good = {"region": "eu-west-1", "image": "ami-12345678"}
        for key, value in (
            ("region", "atlantis-1"),
            ("image", "debian"),
            ("endpoint", "ftp://here"),
            ("threads", 0),
            ("secret_key", "alone"),
            ("agent_port", 70000),
            ("subnet", "subnet-1"),
            ("disk_type", "st1"),  # nothing boots from it
            ("disk_iops", 4000),  # without a disk type
            ("disk_throughput", 250),
            ("disk_iops", -1),
        ):
            table = {**good, key: value}
            error = self.assertRaises(ConfigError, registry.create, Clock(), "aws", table, CONTEXT)
            self.assertIn(key, str(error))
            self.assertNotIn("alone", str(error))

    def test_only_some_types_of_disks_have_operations_and_throughput_of_ones_own(self) -> None:
        for type, iops, throughput, wrong in (
            ("", 0, 0, ""),
            ("gp3", 0, 0, ""),
            ("gp3", 4000, 250, ""),
            ("gp2", 4000, 0, "disk_iops"),
            ("gp2", 0, 250, "disk_throughput"),
            ("io2", 4000, 0, ""),
            ("io2", 0, 0, "disk_iops"),
            ("io2", 4000, 250, "disk_throughput"),
        ):
            disk = {"disk_type": type, "disk_iops": iops, "disk_throughput": throughput}
            table = {"region": "eu-west-1", "image": "ami-12345678", **disk}
            if wrong:
                error = self.assertRaises(ConfigError, config.structure, table, Settings, source="test")
                self.assertIn(wrong, str(error))
            else:
                self.assertEqual(config.structure(table, Settings, source="test").disk_type, type)

    def test_a_posted_form_is_signed_as_aws_own_library_signs_it(self) -> None:
        """libcloud only signs GET requests to EC2; botocore's signature is the reference."""
        sent: list[dict[str, Any]] = []
        driver = Driver("AKID", "SECRET", region="eu-west-1", token="TOKEN", signature_version="4")
        connection = driver.connection
        connection.connect()

        def capture(**request: Any) -> None:
            sent.append(request)
            raise ConnectionError

        connection.connection.request = capture
        self.assertRaises(ConnectionError, driver.request, "DescribeAddresses", Domain="vpc & more")
        [request] = sent
        self.assertEqual((request["method"], request["url"]), ("POST", "/"))
        signature = sigv4.of(request, "ec2", "eu-west-1")
        self.assertEqual(signature.sent, signature.expected)
        self.assertIn("x-amz-security-token", signature.headers)
        self.assertIn("Version=2016-11-15", str(request["body"]))

    def test_settings_show_no_secret(self) -> None:
        shown = repr(attrs.evolve(self.settings, access_key="AK", secret_key="hush"))
        self.assertNotIn("hush", shown)
