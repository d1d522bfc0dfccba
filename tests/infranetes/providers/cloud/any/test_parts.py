# SPDX-License-Identifier: Apache-2.0
"""The parts of the provider of any driver: names, intents, errors, sizes, credentials."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import requests
from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
from libcloud.common.linode import LinodeExceptionV4
from libcloud.common.types import InvalidCredsError, LibcloudError, MalformedResponseError, ProviderError
from libcloud.common.vultr import VultrException
from libcloud.compute.base import NodeSize
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.any import credentials, dialects, errors, names, sizes
from infranetes.providers.cloud.any.intents import Intents
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.interface import CloudError, ErrorKind

OWNER = names.owner_of("cluster", "node-1")


class NameTests(SynchronousTestCase):
    def test_a_name_says_token_and_sandbox_whatever_they_are(self) -> None:
        for token in (secrets.token_hex(16), "0" * 32, "f" * 32, "0" * 31 + "1"):
            for sandbox in (secrets.token_hex(16), "0" * 32, "f" * 32):
                name = names.name_of(OWNER, token, sandbox, 0)
                self.assertEqual(names.parse(name, OWNER), (token, sandbox))

    def test_it_is_a_host_name_and_a_label_of_every_cloud(self) -> None:
        """Linode's are the narrowest: libcloud's driver has them."""
        name = names.name_of(OWNER, "f" * 32, "f" * 32, 35)
        self.assertRegex(name, r"^[a-z](?:[a-z0-9-]{0,61}[a-z0-9])$")
        self.assertRegex(name, r"^[a-zA-Z]((?!--|__|\.\.)[a-zA-Z0-9-_.])+$")
        self.assertEqual(len(name), 62)

    def test_each_number_of_a_token_has_a_name_of_its_own(self) -> None:
        token, sandbox = secrets.token_hex(16), secrets.token_hex(16)
        found = {names.name_of(OWNER, token, sandbox, number) for number in range(36)}
        self.assertEqual(len(found), 36)
        self.assertEqual({names.parse(name, OWNER) for name in found}, {(token, sandbox)})

    def test_names_of_other_nodes_and_of_anything_else_are_not_ours(self) -> None:
        name = names.name_of(OWNER, "1" * 32, "2" * 32, 0)
        for cluster, node in (("cluster", "node-2"), ("other", "node-1"), ("cluster\0node", "-1")):
            self.assertIsNone(names.parse(name, names.owner_of(cluster, node)))
        too_large = f"{OWNER}0-{'z' * 50}"
        for other in (
            "",
            "web",
            name + "0",
            name[:-1],
            "x" + name,
            name.upper(),
            name + "\n",
            too_large,
            None,
            7,
        ):
            self.assertIsNone(names.parse(other, OWNER), other)

    def test_what_is_no_token_has_no_name(self) -> None:
        for token, sandbox in (("", "2" * 32), ("1" * 32, "x" * 32), ("1" * 31, "2" * 33)):
            self.assertRaises(ValueError, names.name_of, OWNER, token, sandbox, 0)


class IntentTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()) / "intents"
        self.intents = Intents(self.directory, 30.0)

    def test_a_vm_is_not_asked_for_again_while_lists_may_lack_it(self) -> None:
        """By the next daemon either."""
        self.intents._thd_begin("vm-1")
        self.intents._thd_begin("vm-2")
        for daemon in (self.intents, Intents(self.directory, 30.0)):
            error = self.assertRaises(CloudError, daemon._thd_begin, "vm-1")
            self.assertIs(error.kind, ErrorKind.CONFLICT)  # so that a launch looks for it

    def test_it_is_asked_for_again_once_they_would_have_it(self) -> None:
        self.intents._thd_begin("vm-1")
        self.intents._thd_begin("vm-2")
        before = time.time() - 31
        os.utime(self.directory / "vm-1", (before, before))
        self.intents._thd_begin("vm-1")
        self.assertEqual({file.name for file in self.directory.iterdir()}, {"vm-1", "vm-2"})
        for name in ("vm-1", "vm-2"):
            os.utime(self.directory / name, (before, before))
        self.intents._thd_begin("vm-3")
        self.assertEqual([file.name for file in self.directory.iterdir()], ["vm-3"], "old ones are forgotten")

    def test_the_wait_begins_with_the_end_of_a_call_of_which_nobody_knows_what_it_did(self) -> None:
        self.intents._thd_begin("vm-1")
        before = time.time() - 31
        os.utime(self.directory / "vm-1", (before, before))
        self.intents._thd_uncertain("vm-1")
        self.assertRaises(CloudError, self.intents._thd_begin, "vm-1")

    def test_a_clock_that_was_set_back_prolongs_no_wait(self) -> None:
        self.intents._thd_begin("vm-1")
        later = time.time() + 3600
        os.utime(self.directory / "vm-1", (later, later))
        self.assertRaises(CloudError, self.intents._thd_begin, "vm-1")
        self.assertLessEqual(Intents(self.directory, 0.0)._thd_left(self.directory / "vm-1"), 0)

    def test_one_that_was_refused_is_asked_for_again_at_once(self) -> None:
        self.intents._thd_begin("vm-1")
        for _ in range(2):
            self.intents._thd_end("vm-1")
        self.intents._thd_begin("vm-1")

    def test_nothing_is_asked_for_that_can_not_be_noted(self) -> None:
        self.directory.parent.write_text("a file")
        error = self.assertRaises(CloudError, self.intents._thd_begin, "vm-1")
        self.assertIn("state_dir", str(error))


class ErrorTests(SynchronousTestCase):
    def check(self, error: Exception, kind: ErrorKind) -> CloudError:
        found = errors.classify(error) or classify(error)
        self.assertIs(found.kind, kind, error)
        return found

    def test_statuses_are_found_where_drivers_leave_them(self) -> None:
        for error, kind in (
            (BaseHTTPError(503, "Service Unavailable"), ErrorKind.TRANSIENT),
            (BaseHTTPError(404, "no such droplet"), ErrorKind.NOT_FOUND),
            (VultrException(500, "Internal server error"), ErrorKind.TRANSIENT),
            (VultrException(401, "Invalid API token."), ErrorKind.CREDENTIALS),
            (LibcloudError("Too many requests Status code: 429."), ErrorKind.THROTTLED),
            (LibcloudError("Not found Status code: 404."), ErrorKind.NOT_FOUND),
            (ProviderError("unknown volume", 400), ErrorKind.INVALID),
            (Exception("Server is broken (code: 502)"), ErrorKind.TRANSIENT),
        ):
            self.check(error, kind)

    def test_what_libcloud_itself_tells_is_the_same_as_for_every_cloud(self) -> None:
        self.check(InvalidCredsError("no"), ErrorKind.CREDENTIALS)
        throttled = RateLimitReachedError(headers={"retry-after": "7"})
        self.assertEqual(self.check(throttled, ErrorKind.THROTTLED).retry_after, 7)
        self.check(MalformedResponseError("<html>"), ErrorKind.TRANSIENT)
        self.check(requests.exceptions.ConnectionError("status 400"), ErrorKind.TRANSIENT)
        self.check(OSError(104, "reset"), ErrorKind.TRANSIENT)

    def test_an_error_without_a_status_may_have_had_any_effect(self) -> None:
        for error in (LinodeExceptionV4("Invalid name"), KeyError("droplet"), Exception("4 of 400 failed")):
            self.check(error, ErrorKind.UNEXPECTED)

    def test_a_full_quota_and_a_lack_of_capacity_are_told_by_their_words(self) -> None:
        for words in (
            "creating this/these droplet(s) will exceed your droplet limit",
            "Account Limit reached. Please open a support ticket.",
            "You have reached the maximum monthly fee limit for this account.",
            "Quota exceeded for cores",
            "Maximum number of resources of type 'user_vm' for account has been exceeded",
        ):
            self.check(BaseHTTPError(422, words), ErrorKind.QUOTA)
            self.check(BaseHTTPError(403, words), ErrorKind.QUOTA)
        for words in (
            "No open slots for this plan!",
            "Server add failed: This plan is not available in the selected location.",
            "Size is not available in this region.",
            "Unable to create a deployment for VM due to insufficient capacity",
        ):
            self.check(BaseHTTPError(422, words), ErrorKind.CAPACITY)
        self.check(ProviderError("Unable to create: insufficient capacity", 533), ErrorKind.CAPACITY)

    def test_words_of_errors_that_pass_are_no_refusals(self) -> None:
        """Nothing is known to be undone then."""
        self.check(BaseHTTPError(503, "the region is unavailable"), ErrorKind.TRANSIENT)
        self.check(BaseHTTPError(429, "rate limit exceeded"), ErrorKind.THROTTLED)
        self.check(BaseHTTPError(500, "quota exceeded"), ErrorKind.TRANSIENT)


def size(id: str, ram: Any, price: Any, name: str = "", **extra: Any) -> Any:
    return NodeSize(id, name or id, ram, 25, 0, price, None, extra)


class SizeTests(SynchronousTestCase):
    def offer(self, of: Any, hours: float = 1.0, **options: Any) -> Any:
        return sizes.offer(of, hours, options.get("prices", {}), options.get("places", ()))

    def test_processors_are_found_by_any_drivers_name_for_them(self) -> None:
        for extra in ({"vcpus": 4}, {"vcpu_count": 4}, {"cpus": "4"}, {"core_number": 4}, {"cores": 4.0}):
            self.assertEqual(self.offer(size("a", 1024, 0.1, **extra)).cpu_millis, 4000)
        self.assertEqual(self.offer(size("a", 1024, 0.1)).cpu_millis, 1000, "one, if none are told")

    def test_a_price_is_one_of_an_hour_or_none(self) -> None:
        self.assertEqual(self.offer(size("a", 1024, "7.3"), 730).price, 0.01)
        for price in (None, 0, "free"):
            self.assertIsNone(self.offer(size("a", 1024, price)).price)
        own = self.offer(size("a", 1024, 1), prices={"a": 0.5})
        self.assertEqual(own.price, 0.5)

    def test_a_size_without_memory_or_sold_elsewhere_is_none(self) -> None:
        self.assertIsNone(self.offer(size("a", None, 1)))
        for key in ("regions", "locations"):
            more: dict[str, Any] = {key: ["x", "y"]}
            of = size("a", 1024, 1, **more)
            self.assertIsNone(self.offer(of, places={"z"}))
            self.assertIsNotNone(self.offer(of, places={"y", "z"}))
            self.assertIsNotNone(self.offer(of))
        self.assertIsNotNone(self.offer(size("a", 1024, 1), places={"z"}))

    def test_a_size_is_called_by_its_id_unless_nobody_can_read_that(self) -> None:
        self.assertEqual(self.offer(size("s-1", 1024, 1, name="Small")).name, "s-1")
        of = size("b6e9d1e8-89fc-4db3-aaa4-9b4c5b1d0844", 1024, 1, name="Micro")
        self.assertEqual(self.offer(of).name, "Micro")

    def test_machines_of_another_kind_are_marked(self) -> None:
        self.assertEqual(self.offer(size("a", 1024, 1, arch="arm64")).architecture, "arm64")
        self.assertEqual(self.offer(size("a", 1024, 1, gpus=1)).gpus, 1)


class CredentialsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp()).absolute()

    def write(self, text: str, mode: int = 0o600) -> None:
        self.path.write_text(text)
        self.path.chmod(mode)

    def test_the_file_has_the_drivers_arguments(self) -> None:
        self.write('key = "k"\nsecret = "s"\n')
        self.assertEqual(credentials._thd_read(str(self.path)), {"key": "k", "secret": "s"})

    def test_a_file_that_can_not_be_used_is_refused_without_its_content(self) -> None:
        for text, mode, words in (
            ('key = "hidden"', 0o640, "chmod 600"),
            ("key = hidden", 0o600, "TOML"),
            ("hidden", 0o600, "TOML"),
        ):
            self.write(text, mode)
            error = self.assertRaises(CloudError, credentials._thd_read, str(self.path))
            self.assertIs(error.kind, ErrorKind.CREDENTIALS)
            self.assertIn(words, str(error))
            self.assertIsNone(re.search("hidden", str(error)))
        self.path.unlink()
        self.assertIn(
            "No such file", str(self.assertRaises(CloudError, credentials._thd_read, str(self.path)))
        )

    def test_a_change_of_the_file_is_seen(self) -> None:
        self.assertEqual(credentials.version(str(self.path)), ())
        self.write("key = 1")
        before = credentials.version(str(self.path))
        self.assertEqual(credentials.version(str(self.path)), before)
        self.write("key = 12")
        self.assertNotEqual(credentials.version(str(self.path)), before)

    def test_a_driver_is_told_where_to_connect_and_how_long_to_wait(self) -> None:
        """By whatever arguments it has: that of DigitalOcean takes neither."""
        for name in ("digitalocean", "vultr", "equinixmetal"):
            driver: Any = dialects.find(name)(key="k")
            own = driver.connection.connection.host
            credentials.set_up(driver, "", 7.0)
            made = driver.connection.connection
            self.assertEqual((made.host, made.session.timeout), (own, 7.0), name)
            credentials.set_up(driver, "http://127.0.0.1:9", 8.0)
            made = driver.connection.connection
            self.assertEqual((made.host, made.session.timeout), ("http://127.0.0.1:9", 8.0), name)
        without: Any = object()
        credentials.set_up(without, "", 7.0)  # a driver without a connection of libcloud's
