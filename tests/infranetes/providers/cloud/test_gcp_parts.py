"""The parts of the GCP provider that need no cloud: names, errors, sizes, settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import requests
from hypothesis import given
from hypothesis import strategies as st
from libcloud.common.google import GoogleBaseError
from libcloud.common.types import MalformedResponseError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from infranetes.providers import registry
from infranetes.providers.cloud.gcp import errors, names
from infranetes.providers.cloud.gcp.cloud import GcpCloud
from infranetes.providers.cloud.gcp.driver import Response
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.sizes import offer
from infranetes.providers.cloud.interface import ICloud, Trouble
from infranetes.providers.cloud.judge import judge
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from tests.support.clouds import recorded

CONTEXT = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "c", "n")
GOOD = {"project": "test-project", "zones": ["europe-west1-b"], "image": "family/infranetes"}
# As the API's reference has it, but for letters of other scripts.
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")


class NameTests(SynchronousTestCase):
    @given(st.text(max_size=100))
    def test_a_label_holds_anything_and_says_what_if_it_is_short(self, text: str) -> None:
        held = names.label(text)
        self.assertTrue(_LABEL.fullmatch(held), held)
        if len(text.encode()) * 3 <= 63:
            self.assertEqual(names.value(held), text)

    @given(st.text(max_size=80), st.text(max_size=80))
    def test_different_values_have_different_labels(self, one: str, other: str) -> None:
        self.assertEqual(names.label(one) == names.label(other), one == other)

    def test_what_is_usual_is_itself_and_what_is_not_can_not_pass_for_it(self) -> None:
        for text in ("production", "node-1", "0123456789abcdef" * 2):
            self.assertEqual(names.label(text), text)
        alike = ["node-1.example.org", "node-1-example-org", "node-1_2eexample_2eorg", "Node-1.example.org"]
        self.assertEqual(len({names.label(text) for text in alike}), 4)
        ends = ["x." * 40 + "a", "x." * 40 + "b"]
        self.assertEqual(len({names.label(text) for text in ends}), 2)

    def test_ids_are_zone_and_name_and_nothing_else_is_one(self) -> None:
        id = names.id_of("europe-west1-b", names.name_of("f" * 32, 0))
        self.assertTrue(names.is_id(id))
        self.assertEqual(names.split_id(id), ("europe-west1-b", f"infranetes-{'f' * 32}-0"))
        for other in ("", "web", "../../x", "europe-west1-b.", "b.x/y", "b.x y", "b.x?y", f"{id}\n", "é.é"):
            self.assertFalse(names.is_id(other), other)

    def test_images_are_of_the_project_unless_they_say_otherwise(self) -> None:
        for given_, path in (
            ("guest", "projects/p/global/images/guest"),
            ("family/guest", "projects/p/global/images/family/guest"),
            ("global/images/guest", "projects/p/global/images/guest"),
            ("projects/debian-cloud/global/images/family/debian-12",) * 2,
        ):
            self.assertTrue(re.fullmatch(names.IMAGE, given_))
            self.assertEqual(names.image_path(given_, "p"), path)


def _raised(status: int, body: Any, **headers: str) -> Exception:
    """What libcloud makes of an answer."""
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


class ErrorTests(SynchronousTestCase):
    def test_refusals_of_requests(self) -> None:
        for status, reason, trouble in (
            (403, "rateLimitExceeded", Trouble.THROTTLED),
            (403, "userRateLimitExceeded", Trouble.THROTTLED),
            (429, "rateLimitExceeded", Trouble.THROTTLED),
            (403, "quotaExceeded", Trouble.QUOTA),
            (403, "forbidden", Trouble.CREDENTIALS),
            (403, "whatever", Trouble.CREDENTIALS),
            (401, "authError", Trouble.CREDENTIALS),
            (401, "required", Trouble.CREDENTIALS),
            (400, "required", Trouble.INVALID),
            (400, "invalid", Trouble.INVALID),
            (400, "resourceNotReady", Trouble.PASSING),
            (404, "notFound", Trouble.MISSING),
            (409, "alreadyExists", Trouble.CONFLICT),
            (500, "internalError", Trouble.PASSING),
            (503, "backendError", Trouble.PASSING),
        ):
            found = errors.judge(_raised(status, _refusal(status, reason)))
            assert found is not None
            self.assertIs(found.trouble, trouble, reason)
            # of some libcloud's releases, what is not found has lost its reason
            self.assertIn(str(found), (f"{reason}: words of it", "404: words of it"))

    def test_ends_of_operations(self) -> None:
        for code, trouble in (
            ("ZONE_RESOURCE_POOL_EXHAUSTED", Trouble.CAPACITY),
            ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Trouble.CAPACITY),
            ("QUOTA_EXCEEDED", Trouble.QUOTA),
            ("RESOURCE_ALREADY_EXISTS", Trouble.CONFLICT),
            ("PERMISSIONS_ERROR", Trouble.CREDENTIALS),
            ("INTERNAL_ERROR", Trouble.PASSING),
            ("UNSUPPORTED_OPERATION", Trouble.INVALID),
            ("SOMETHING_NEW", Trouble.PASSING),
        ):
            found = errors.judge(_raised(200, _ended(code)))
            assert found is not None
            self.assertIs(found.trouble, trouble, code)

    def test_what_is_between_may_answer_too(self) -> None:
        page = errors.judge(_raised(502, "<html><body>secret page</body></html>"))
        assert page is not None
        self.assertIs(page.trouble, Trouble.PASSING)
        self.assertNotIn("secret", str(page))
        half = errors.judge(_raised(200, '{"kind": "compute#ins'))
        assert half is not None
        self.assertIs(half.trouble, Trouble.PASSING)
        bare = errors.judge(_raised(200, {"error": {"errors": [{"domain": "x"}]}}))
        assert bare is not None
        self.assertIs(bare.trouble, Trouble.PASSING)

    def test_a_retry_after_is_heard(self) -> None:
        error = _raised(403, _refusal(403, "rateLimitExceeded"), **{"Retry-After": "7"})
        found = errors.judge(error)
        assert found is not None
        self.assertEqual(found.retry_after, 7.0)

    def test_what_is_not_googles_is_left_to_others(self) -> None:
        self.assertIs(errors.judge(ValueError("a bug")), None)
        self.assertIs(judge(MalformedResponseError("html", body="")).trouble, Trouble.PASSING)
        self.assertIsNot(errors.judge(GoogleBaseError("words", 0, None)), None)


class RecordedTests(SynchronousTestCase):
    """What libcloud's tests have recorded is understood."""

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [one for each, one in recorded.resources(recorded.answers()) if each == kind and "id" in one]

    def test_every_instance(self) -> None:
        cloud: Any = GcpCloud(structure(GOOD, Settings, source="test"), CONTEXT)
        instances = [one for one in self.kinds("compute#instance") if "zone" in one]
        self.assertGreater(len(instances), 10)
        for one in instances:
            found = cloud._found(None, one)
            self.assertTrue(cloud.is_id(found.id), found.id)
            self.assertIs(found.state is InstanceState.RUNNING, one["status"] == "RUNNING")
            self.assertRegex(found.private_address, r"^10\.[0-9.]+$")
            self.assertGreater(found.created_at, 1_300_000_000)
            self.assertTrue(found.size)

    def test_every_machine_type_that_zones_have(self) -> None:
        types = self.kinds("compute#machineType")
        self.assertGreater(len(types), 10)
        for one in types:
            found = offer(one, "us-central1")
            self.assertGreaterEqual(found.cpu_millis, 200)
            self.assertGreaterEqual(found.memory_bytes, 512 << 20)
            if found.name.startswith("n1-"):
                self.assertTrue(found.price and 0.03 < found.price < 10, found)


class SettingsTests(SynchronousTestCase):
    def test_it_is_a_cloud(self) -> None:
        verifyObject(ICloud, GcpCloud(structure(GOOD, Settings, source="test"), CONTEXT))

    def test_it_is_registered(self) -> None:
        self.assertEqual(registry.create(Clock(), "gcp", GOOD, CONTEXT).name, "gcp")

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
            ("service_account", "somebody"),
            ("disk_type", "pd balanced"),
            ("endpoint", "ftp://here"),
            ("threads", 0),
            ("keyfile", "/x"),
        ):
            table = {**GOOD, key: value}
            error = self.assertRaises(ConfigError, registry.create, Clock(), "gcp", table, CONTEXT)
            self.assertIn(key, str(error))
