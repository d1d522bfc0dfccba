# SPDX-License-Identifier: Apache-2.0
"""Parts of the GCP provider that need no cloud: names, errors, sizes, settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import requests
from hypothesis import given
from hypothesis import strategies as st
from libcloud.common.google import GoogleBaseError
from libcloud.common.types import MalformedResponseError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import registry
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.gcp import errors, names
from infranetes.providers.cloud.gcp.cloud import GcpCloud
from infranetes.providers.cloud.gcp.driver import Driver, Response
from infranetes.providers.cloud.gcp.libcloud_types import MachineType
from infranetes.providers.cloud.gcp.offers import GcpOffers
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.sizes import bundled_price, offer
from infranetes.providers.cloud.interface import Cloud, CloudError, ErrorKind
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor
from tests.harness.needs import needs_tools
from tests.support.clouds import recorded

CONTEXT = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "c", "n")
GOOD = {"project": "test-project", "zones": ["europe-west1-b"], "image": "family/infranetes"}
# As in the API reference, without letters of other scripts.
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")


class NameTests(SynchronousTestCase):
    @given(st.text(max_size=100))
    def test_a_short_label_can_be_decoded(self, text: str) -> None:
        held = names.label(text)
        self.assertTrue(_LABEL.fullmatch(held), held)
        if len(text.encode()) * 3 <= 63:
            self.assertEqual(names.value(held), text)

    @given(st.text(max_size=80), st.text(max_size=80))
    def test_different_values_have_different_labels(self, one: str, other: str) -> None:
        self.assertEqual(names.label(one) == names.label(other), one == other)

    def test_usual_values_are_labels_as_they_are_and_no_other_has_their_labels(self) -> None:
        for text in ("production", "node-1", "0123456789abcdef" * 2):
            self.assertEqual(names.label(text), text)
        alike = ["node-1.example.org", "node-1-example-org", "node-1_2eexample_2eorg", "Node-1.example.org"]
        self.assertEqual(len({names.label(text) for text in alike}), 4)
        ends = ["x." * 40 + "a", "x." * 40 + "b"]
        self.assertEqual(len({names.label(text) for text in ends}), 2)

    def test_ids_are_zone_and_name(self) -> None:
        id = names.id_of("europe-west1-b", names.name_of("f" * 32, 0))
        self.assertTrue(names.is_id(id))
        self.assertEqual(names.split_id(id), ("europe-west1-b", f"infranetes-{'f' * 32}-0"))
        for other in ("", "web", "../../x", "europe-west1-b.", "b.x/y", "b.x y", "b.x?y", f"{id}\n", "é.é"):
            self.assertFalse(names.is_id(other), other)

    @given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
    def test_each_cluster_has_names_of_its_own(self, one: str, name: str, other: str, second: str) -> None:
        """Whatever the cluster and its volumes are called."""
        made, elsewhere = names.hashed_name_of(one, name), names.hashed_name_of(other, second)
        self.assertTrue(re.fullmatch(names.LABEL, made), made)
        self.assertEqual(made == elsewhere, (one, name) == (other, second))

    def test_links_lead_to_disks_of_zones(self) -> None:
        link = "https://www.googleapis.com/compute/v1/projects/p/zones/europe-west1-b/disks/data"
        for given_ in (link, link.partition("v1/")[2]):
            self.assertEqual(names.disk_of(given_), "europe-west1-b.data")
        for other in ("", link.replace("zones", "regions"), f"{link}/x", link.replace("disks", "instances")):
            self.assertEqual(names.disk_of(other), "", other)

    def test_images_default_to_the_project(self) -> None:
        for given_, path in (
            ("guest", "projects/p/global/images/guest"),
            ("family/guest", "projects/p/global/images/family/guest"),
            ("global/images/guest", "projects/p/global/images/guest"),
            ("projects/debian-cloud/global/images/family/debian-12",) * 2,
        ):
            self.assertTrue(re.fullmatch(names.IMAGE, given_))
            self.assertEqual(names.image_path(given_, "p"), path)


def _raised(status: int, body: Any, **headers: str) -> Exception:
    """Return the error that libcloud raises for an answer."""
    answer = requests.Response()
    answer.status_code = status
    answer._content = (body if isinstance(body, str) else json.dumps(body)).encode()
    answer.headers.update(headers)
    try:
        Response(answer, connection=None)
    except Exception as error:
        return error
    raise AssertionError("it is no error")


def _refusal(status: int, reason: str) -> dict[str, Any]:
    one = {"domain": "global", "reason": reason, "message": "words of it"}
    return {"error": {"errors": [one], "code": status, "message": "words of it"}}


def _ended(code: str) -> dict[str, Any]:
    return {"kind": "compute#operation", "error": {"errors": [{"code": code, "message": "words of it"}]}}


class DiskErrorTests(SynchronousTestCase):
    """What errors of requests for disks mean."""

    def kind(self, status: int, body: Any) -> ErrorKind | None:
        try:
            with errors.disk_refusals():
                raise _raised(status, body)
        except CloudError as error:
            return error.kind
        except GoogleBaseError as error:
            found = errors.classify(error)
            return found.kind if found is not None else None

    def test_refusals_of_requests(self) -> None:
        for status, reason, kind in (
            (400, "resourceInUseByAnotherResource", ErrorKind.STATE),
            (400, "resourceNotReady", ErrorKind.STATE),
            (403, "limitExceeded", ErrorKind.QUOTA),
            (403, "rateLimitExceeded", ErrorKind.THROTTLED),
            (400, "invalid", ErrorKind.INVALID),
            (503, "backendError", ErrorKind.TRANSIENT),
            (409, "alreadyExists", ErrorKind.CONFLICT),
        ):
            self.assertIs(self.kind(status, _refusal(status, reason)), kind, reason)

    def test_operations_that_failed(self) -> None:
        """None of these is polled again, as it has failed."""
        full = "Maximum hyperdisk-balanced disks count should be less than or equal to [16], Requested : [17]"
        for code, message, kind in (
            ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "words", ErrorKind.STATE),
            ("RESOURCE_OPERATION_RATE_EXCEEDED", "words", ErrorKind.STATE),
            ("INTERNAL_ERROR", "words", ErrorKind.STATE),
            ("NEVER_HEARD_OF", "words", ErrorKind.STATE),
            ("QUOTA_EXCEEDED", "words", ErrorKind.QUOTA),
            ("UNSUPPORTED_OPERATION", full, ErrorKind.QUOTA),
            ("UNSUPPORTED_OPERATION", "pd-ssd is not for this machine type", ErrorKind.INVALID),
            ("PERMISSIONS_ERROR", "words", ErrorKind.CREDENTIALS),
        ):
            operation = {"status": "DONE", "error": {"errors": [{"code": code, "message": message}]}}
            self.assertIs(self.kind(200, operation), kind, code)

    def test_an_answer_that_is_none_may_come_next_time(self) -> None:
        self.assertIs(self.kind(200, "<html>"), ErrorKind.TRANSIENT)


class ErrorTests(SynchronousTestCase):
    def test_refusals_of_requests(self) -> None:
        for status, reason, trouble in (
            (403, "rateLimitExceeded", ErrorKind.THROTTLED),
            (403, "userRateLimitExceeded", ErrorKind.THROTTLED),
            (429, "rateLimitExceeded", ErrorKind.THROTTLED),
            (403, "quotaExceeded", ErrorKind.QUOTA),
            (403, "forbidden", ErrorKind.CREDENTIALS),
            (403, "whatever", ErrorKind.CREDENTIALS),
            (401, "authError", ErrorKind.CREDENTIALS),
            (401, "required", ErrorKind.CREDENTIALS),
            (400, "required", ErrorKind.INVALID),
            (400, "invalid", ErrorKind.INVALID),
            (400, "resourceNotReady", ErrorKind.TRANSIENT),
            (404, "notFound", ErrorKind.NOT_FOUND),
            (409, "alreadyExists", ErrorKind.CONFLICT),
            (500, "internalError", ErrorKind.TRANSIENT),
            (503, "backendError", ErrorKind.TRANSIENT),
        ):
            found = errors.classify(_raised(status, _refusal(status, reason)))
            assert found is not None
            self.assertIs(found.kind, trouble, reason)
            # some releases of libcloud lose the reason of "not found"
            self.assertIn(str(found), (f"{reason}: words of it", "404: words of it"))

    def test_a_quota_of_a_minute_is_not_asked_again_and_again(self) -> None:
        for words, seconds in (
            ("Quota exceeded for quota metric 'Queries' and limit 'Queries per minute per region'", 10.0),
            ("Rate Limit Exceeded", 0.0),
        ):
            found = errors.classify(GoogleBaseError({"message": words}, 403, "rateLimitExceeded"))
            assert found is not None
            self.assertEqual((found.kind, found.retry_after), (ErrorKind.THROTTLED, seconds))

    def test_errors_of_operations(self) -> None:
        for code, trouble in (
            ("ZONE_RESOURCE_POOL_EXHAUSTED", ErrorKind.CAPACITY),
            ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", ErrorKind.CAPACITY),
            ("QUOTA_EXCEEDED", ErrorKind.QUOTA),
            ("IP_SPACE_EXHAUSTED", ErrorKind.QUOTA),
            ("RESOURCE_ALREADY_EXISTS", ErrorKind.CONFLICT),
            ("PERMISSIONS_ERROR", ErrorKind.CREDENTIALS),
            ("INTERNAL_ERROR", ErrorKind.TRANSIENT),
            ("UNSUPPORTED_OPERATION", ErrorKind.INVALID),
            ("SOMETHING_NEW", ErrorKind.TRANSIENT),
        ):
            found = errors.classify(_raised(200, _ended(code)))
            assert found is not None
            self.assertIs(found.kind, trouble, code)

    def test_quotas_of_one_family_and_of_all(self) -> None:
        family = ("CPUS", "N2_CPUS", "N2D_CPUS", "CPUS_PER_VM_FAMILY", "PREEMPTIBLE_NVIDIA_L4_GPUS")
        every = ("CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS", "PREEMPTIBLE_CPUS", "INSTANCES", "SSD_TOTAL_GB")
        for metric in (*family, *every):
            operation = _ended("QUOTA_EXCEEDED")
            words = f"Quota '{metric}' exceeded.  Limit: 24.0 in region europe-west1."
            operation["error"]["errors"][0]["message"] = words
            found = errors.classify(_raised(200, operation))
            assert found is not None
            kind = ErrorKind.FAMILY_QUOTA if metric in family else ErrorKind.QUOTA
            self.assertIs(found.kind, kind, metric)

    def test_which_quota_a_machine_types_cpus_count_for(self) -> None:
        for name, quota in (
            ("e2-micro", "CPUS"),
            ("n1-standard-1", "CPUS"),
            ("n2-highcpu-2", "N2_CPUS"),
            ("n2d-standard-2", "N2D_CPUS"),
        ):
            self.assertEqual(offer({"name": name}).quota, quota)

    def test_answers_of_proxies(self) -> None:
        page = errors.classify(_raised(502, "<html><body>secret page</body></html>"))
        assert page is not None
        self.assertIs(page.kind, ErrorKind.TRANSIENT)
        self.assertNotIn("secret", str(page))
        half = errors.classify(_raised(200, '{"kind": "compute#ins'))
        assert half is not None
        self.assertIs(half.kind, ErrorKind.TRANSIENT)
        bare = errors.classify(_raised(200, {"error": {"errors": [{"domain": "x"}]}}))
        assert bare is not None
        self.assertIs(bare.kind, ErrorKind.TRANSIENT)

    def test_retry_after_is_kept(self) -> None:
        error = _raised(403, _refusal(403, "rateLimitExceeded"), **{"Retry-After": "7"})
        found = errors.classify(error)
        assert found is not None
        self.assertEqual(found.retry_after, 7.0)

    def test_errors_that_are_not_googles_are_not_classified(self) -> None:
        self.assertIs(errors.classify(ValueError("a bug")), None)
        self.assertIs(classify(MalformedResponseError("html", body="")).kind, ErrorKind.TRANSIENT)
        self.assertIsNot(errors.classify(GoogleBaseError("words", 0, None)), None)


@needs_tools("wheels")
class RecordedTests(SynchronousTestCase):
    """Answers recorded by libcloud's tests are understood."""

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [one for each, one in recorded.resources(recorded.answers()) if each == kind and "id" in one]

    def test_every_instance(self) -> None:
        cloud: Any = GcpCloud(structure(GOOD, Settings, source="test"), CONTEXT, _book())
        instances = [one for one in self.kinds("compute#instance") if "zone" in one]
        self.assertGreater(len(instances), 10)
        for one in instances:
            found = cloud._vm(None, one)
            self.assertTrue(cloud.is_id(found.id), found.id)
            self.assertIs(found.state is InstanceState.RUNNING, one["status"] == "RUNNING")
            self.assertRegex(found.private_address, r"^10\.[0-9.]+$")
            self.assertGreater(found.created_at, 1_300_000_000)
            self.assertTrue(found.size)

    def test_every_machine_type(self) -> None:
        types = self.kinds("compute#machineType")
        self.assertGreater(len(types), 10)
        for one in types:
            found = offer(cast(MachineType, one))
            price = bundled_price(found, "us-central1")
            self.assertGreaterEqual(found.cpu_millis, 200)
            self.assertGreaterEqual(found.memory_bytes, 512 << 20)
            if found.name.startswith("n1-"):
                self.assertTrue(price and 0.03 < price < 10, found)


def _book() -> OfferBook[Driver]:
    return OfferBook(Path("/nonexistent"), GcpOffers(structure(GOOD, Settings, source="test")), {})


class SettingsTests(SynchronousTestCase):
    def test_it_is_a_cloud(self) -> None:
        cloud: Cloud[Driver] = GcpCloud(structure(GOOD, Settings, source="test"), CONTEXT, _book())
        self.assertIsInstance(cloud, Cloud)

    def test_it_is_registered(self) -> None:
        self.assertEqual(registry.create(cast(IReactor, Clock()), "gcp", GOOD, CONTEXT).name, "gcp")

    def test_wrong_settings_are_named(self) -> None:
        for key, value in (
            ("project", "Not a project"),
            ("project", ""),
            ("zones", []),
            ("zones", ["europe-west1"]),
            ("zones", ["europe-west1-b", "us-central1-a"]),
            ("image", "../../x"),
            ("image", ""),
            ("subnetwork", "Pods!"),
            ("tags", ["Web_1"]),
            ("disk_key", "disks"),
            ("disk_key", "projects/key-project/locations/europe/keyRings/r/cryptoKeys/../k"),
            ("vtpm", False),  # and integrity_monitoring
            ("service_account", "somebody"),
            ("disk_type", "pd balanced"),
            ("endpoint", "ftp://here"),
            ("threads", 0),
            ("keyfile", "/x"),
        ):
            table = {**GOOD, key: value}
            error = self.assertRaises(ConfigError, registry.create, Clock(), "gcp", table, CONTEXT)
            self.assertIn(key, str(error))
