# SPDX-License-Identifier: Apache-2.0
"""Parts of the OpenStack provider that need no cloud: names, errors, clouds.yaml, endpoints, sizes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

import requests
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import registry
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.interface import Cloud, CloudError, ErrorKind
from infranetes.providers.cloud.openstack import clouds_file, errors, names
from infranetes.providers.cloud.openstack.cloud import OpenStackCloud
from infranetes.providers.cloud.openstack.credentials import endpoints
from infranetes.providers.cloud.openstack.driver import Answer, Driver
from infranetes.providers.cloud.openstack.libcloud_types import Flavor, Token
from infranetes.providers.cloud.openstack.settings import Settings
from infranetes.providers.cloud.openstack.sizes import offer, usable
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor
from tests.harness.needs import tool
from tests.support.clouds import keystone_rules, neutron_attributes, nova_resources, nova_schemas

NEEDS = (tool("wheels"),)

CONTEXT = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "c", "n")
GOOD = {"cloud": "pods", "image": "infranetes", "network": "pods"}
PASSWORD = {
    "auth_url": "https://keystone:5000/v3",
    "username": "node",
    "password": "hidden",
    "project_name": "pods",
    "user_domain_name": "Default",
}
APPLICATION = {
    "auth_url": "https://keystone:5000/v3/",
    "application_credential_id": "b7f1a0c1",
    "application_credential_secret": "hidden",
}


class NameTests(SynchronousTestCase):
    @given(st.text(max_size=80))
    def test_every_tag_is_one_that_nova_takes(self, value: str) -> None:
        tag = names.tag("infranetes-cluster", value)
        body = {"server": {"name": "x", "flavorRef": "1", "networks": "auto", "tags": [tag]}}
        self.assertEqual(nova_schemas.schemas().wrong("servers", "create", body), [])

    @given(st.text(max_size=60), st.text(max_size=60))
    def test_different_values_have_different_tags(self, one: str, other: str) -> None:
        self.assertEqual(
            names.tag("infranetes-node", one) == names.tag("infranetes-node", other), one == other
        )

    def test_usual_values_can_be_read_in_tags(self) -> None:
        self.assertEqual(
            names.tag("infranetes-node", "node-1.example.org"), "infranetes-node=node-1.example.org"
        )

    def test_ids_of_servers(self) -> None:
        self.assertTrue(names.is_id("0b5d2c72-12cc-4ba6-a8d7-3ff5cc1d8cb8"))
        for other in ("", "web", "../../x", "0b5d2c72-12cc-4ba6-a8d7-3ff5cc1d8cb8/x", "0B5D2C72", "é" * 36):
            self.assertFalse(names.is_id(other), other)

    def test_a_name_is_found_as_a_whole(self) -> None:
        name = names.name_of("f" * 32, 1)
        self.assertTrue(re.search(names.exactly(name), name))
        self.assertFalse(re.search(names.exactly(name), f"{name}2"))


def _raised(status: int, body: Any, **headers: str) -> Exception:
    """Return the error that libcloud raises for an answer."""
    answer = requests.Response()
    answer.status_code, answer.reason = status, "a reason"
    answer._content = (body if isinstance(body, str) else json.dumps(body)).encode()
    answer.headers.update(headers)
    try:
        Answer(answer, connection=None)
    except Exception as error:
        return error
    raise AssertionError("it is no error")


def _fault(message: str) -> Any:
    return {"forbidden": {"code": 403, "message": message}}


class ErrorTests(SynchronousTestCase):
    def kind(self, status: int, body: Any) -> ErrorKind:
        error = _raised(status, body)
        return (errors.classify(error) or classify(error)).kind

    def test_refusals_of_requests(self) -> None:
        policy = "Policy doesn't allow os_compute_api:servers:create to be performed."
        neutron = {"NeutronError": {"type": "OverQuota", "message": "Quota exceeded for resources: ['port'].",
                                    "detail": ""}}  # fmt: skip
        full = {"NeutronError": {"type": "IpAddressGenerationFailure", "detail": "",
                                 "message": "No more IP addresses available on network 1."}}  # fmt: skip
        for status, body, kind in (
            (
                403,
                _fault("Quota exceeded for cores: Requested 4, but already used 20"),
                ErrorKind.QUOTA,
            ),
            (403, _fault("Maximum number of ports exceeded"), ErrorKind.QUOTA),
            (413, _fault("Quota exceeded for instances"), ErrorKind.QUOTA),
            (409, neutron, ErrorKind.QUOTA),
            (409, full, ErrorKind.QUOTA),
            (413, _fault("This request was rate-limited."), ErrorKind.THROTTLED),
            (429, "", ErrorKind.THROTTLED),
            (403, _fault(policy), ErrorKind.CREDENTIALS),
            (401, _fault("The request you have made requires authentication."), ErrorKind.CREDENTIALS),
            (400, _fault("Invalid input for field/attribute name."), ErrorKind.INVALID),
            (404, _fault("Instance could not be found."), ErrorKind.NOT_FOUND),
            (409, _fault("Cannot 'delete' instance while it is in vm_state building"), ErrorKind.STATE),
            (500, _fault("Unexpected API Error."), ErrorKind.TRANSIENT),
            (503, "<html>secret page</html>", ErrorKind.TRANSIENT),
            (406, _fault("Version 2.67 is not supported by the API."), ErrorKind.INVALID),
        ):
            self.assertIs(self.kind(status, body), kind, body)

    def test_refusals_of_requests_about_volumes(self) -> None:
        """With the messages of Cinder's and Nova's exceptions."""
        for status, words, kind in (
            (413, "Requested volume or snapshot exceeds allowed gigabytes quota. Requested 1G, quota is 1G "
                  "and 1G has been consumed.", ErrorKind.QUOTA),
            (413, "Requested volume size 9G is larger than maximum allowed limit 8G.", ErrorKind.QUOTA),
            (413, "Maximum number of volumes allowed (10) exceeded for quota 'volumes'.", ErrorKind.QUOTA),
            (413, "Maximum number of snapshots allowed (10) exceeded", ErrorKind.QUOTA),
            (413, "Unexpected over quota on gigabytes_fast.", ErrorKind.QUOTA),
            (403, "The maximum allowed number of disk devices (26) to attach to a single instance has been "
                  "exceeded.", ErrorKind.QUOTA),
            (400, "Invalid volume: Volume ID status must be available or downloading to reserve, but the "
                  "current status is in-use.", ErrorKind.STATE),
            (400, "Invalid volume: volume ID already attached", ErrorKind.STATE),
            (400, "Invalid volume: Invalid input received: Invalid volume: Unable to detach volume. Volume "
                  "status must be 'in-use' and attach_status must be 'attached' to detach.", ErrorKind.STATE),
            (400, "Invalid snapshot: Snapshot status must be available or error and must not be part of a "
                  "group.", ErrorKind.STATE),
            (400, "Invalid input received: New size for extend must be greater than current size. "
                  "(current: 2, extended: 2).", ErrorKind.STATE),
            (409, "Cannot 'attach_volume' instance ID while it is in task_state resize_prep",
             ErrorKind.STATE),
            (400, "Invalid volume: Instance ID and volume ID are not in the same availability_zone. Instance "
                  "is in a. Volume is in b", ErrorKind.INVALID),
            (400, "Availability zone 'gone' is invalid.", ErrorKind.INVALID),
            (404, "Volume ID could not be found.", ErrorKind.NOT_FOUND),
            (503, "status must be: there is no answer", ErrorKind.TRANSIENT),
        ):  # fmt: skip
            try:
                with errors.disk_refusals():
                    raise _raised(status, _fault(words))
            except CloudError as error:
                found = error
            except Exception as error:
                found = errors.classify(error) or classify(error)
            self.assertIs(found.kind, kind, words)

    def test_messages_are_words(self) -> None:
        for body, words in (
            (_fault("words of\nit"), "403 words of it"),
            ({"NeutronError": {"type": "X", "message": "words of it", "detail": ""}}, "403 words of it"),
            ({"NeutronError": "words of it"}, "403 words of it"),
            ("<html>secret page</html>", "403 a reason"),
            ("", "403 a reason"),
            ([], "403 []"),
        ):
            self.assertEqual(str(_raised(403, body)), words)

    def test_retry_after_is_kept(self) -> None:
        error = _raised(413, _fault("words"), **{"Retry-After": "7"})
        found = errors.classify(error)
        assert found is not None
        self.assertEqual((found.kind, found.retry_after), (ErrorKind.THROTTLED, 7.0))

    def test_faults_of_servers(self) -> None:
        for message, kind in (
            ("No valid host was found. There are not enough hosts available.", ErrorKind.CAPACITY),
            ("Exceeded maximum number of retries. Exhausted all hosts available", ErrorKind.CAPACITY),
            (
                "Build of instance 1 aborted: No fixed IP addresses available for network: 1",
                ErrorKind.QUOTA,
            ),
            (
                "VolumeSizeExceedsAvailableQuota: exceeds allowed gigabytes quota",
                ErrorKind.QUOTA,
            ),
            ("Build of instance 1 aborted: Image is corrupt", None),
        ):
            self.assertIs(errors.of_fault(message), kind, message)


class CloudsFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.file = self.directory / "clouds.yaml"

    def write(self, entry: Any, name: str = "clouds.yaml", mode: int = 0o600) -> None:
        file = self.directory / name
        file.touch(mode=mode)
        file.chmod(mode)
        file.write_text(json.dumps({"clouds": {"pods": entry}}))

    def read(self, entry: Any) -> clouds_file.Access:
        self.write(entry)
        return clouds_file._thd_read(self.file, "pods")

    def refused(self, *parts: str) -> None:
        with self.assertRaises(CloudError) as caught:
            clouds_file._thd_read(self.file, "pods")
        self.assertIs(caught.exception.kind, ErrorKind.CREDENTIALS)
        for part in parts:
            self.assertIn(part, str(caught.exception))
        self.assertNotIn("hidden", str(caught.exception))

    def test_a_password(self) -> None:
        found = self.read(
            {"auth": PASSWORD, "region_name": "R", "interface": "internal", "cacert": "/ca.pem"}
        )
        self.assertEqual(
            (found.auth_url, found.region, found.interface, found.ca_file),
            ("https://keystone:5000", "R", "internal", "/ca.pem"),
        )
        user = {"name": "node", "domain": {"name": "Default"}, "password": "hidden"}
        self.assertEqual(
            found.request,
            {
                "auth": {
                    "identity": {"methods": ["password"], "password": {"user": user}},
                    "scope": {"project": {"name": "pods", "domain": {"id": "default"}}},
                }
            },
        )
        self.assertNotIn("hidden", repr(found))

    def test_an_application_credential_by_id_and_by_name(self) -> None:
        for auth_type in ("v3applicationcredential", ""):
            found = self.read({"auth": APPLICATION, "auth_type": auth_type})
            self.assertEqual(
                found.request,
                {
                    "auth": {
                        "identity": {
                            "methods": ["application_credential"],
                            "application_credential": {"id": "b7f1a0c1", "secret": "hidden"},
                        }
                    }
                },
            )
        named = {
            **APPLICATION,
            "application_credential_id": "",
            "application_credential_name": "n",
            "user_id": "u",
        }
        request: Any = self.read({"auth": named}).request
        self.assertEqual(
            request["auth"]["identity"]["application_credential"],
            {"name": "n", "user": {"id": "u"}, "secret": "hidden"},
        )

    def test_secrets_may_be_in_a_file_of_their_own(self) -> None:
        auth = {key: value for key, value in PASSWORD.items() if key != "password"}
        self.write({"auth": {"password": "other"}}, "secure.yaml")
        self.write({"auth": auth}, mode=0o644)
        request: Any = clouds_file._thd_read(self.file, "pods").request
        self.assertEqual(request["auth"]["identity"]["password"]["user"]["password"], "other")

    def test_what_can_not_be_used_is_refused_with_the_reason(self) -> None:
        self.refused("can't be read")
        self.file.write_text("clouds: [")
        self.refused("is no clouds.yaml")
        self.file.write_text("- x")
        self.refused("is no clouds.yaml")
        for entry, word in (
            ({"profile": "vendor"}, "auth_url"),
            ({"auth": PASSWORD, "verify": False}, "cacert"),
            ({"auth": PASSWORD, "interface": "x"}, "interface"),
            ({"auth": PASSWORD, "auth_type": "v3oidcpassword"}, "v3oidcpassword"),
            ({"auth": {**PASSWORD, "password": ""}}, "password"),
            ({"auth": {**PASSWORD, "project_name": ""}}, "tenant_name"),
            ({"auth": {**PASSWORD, "auth_url": "keystone"}}, "auth_url"),
        ):
            self.write(entry)
            self.refused(word)
        self.write({"auth": PASSWORD}, mode=0o640)
        self.refused("0640", "chmod 600")
        self.file.write_text(json.dumps({"clouds": {"other": {}}}))
        self.refused("no cloud called 'pods'")

    def test_it_is_found_where_other_clients_find_it(self) -> None:
        self.patch(os, "environ", {"OS_CLIENT_CONFIG_FILE": "/by/environment"})
        self.assertEqual(clouds_file.find("/configured"), Path("/configured"))
        self.assertEqual(clouds_file.find(""), Path("/by/environment"))
        self.patch(os, "environ", {"HOME": str(self.directory)})
        self.assertEqual(clouds_file.find(""), Path("/etc/openstack/clouds.yaml"))
        mine = self.directory / ".config/openstack/clouds.yaml"
        mine.parent.mkdir(parents=True)
        mine.touch()
        self.assertEqual(clouds_file.find(""), mine)


class EndpointTests(SynchronousTestCase):
    def token(self, **urls: str) -> Token:
        return {
            "catalog": [
                {
                    "type": each,
                    "endpoints": [{"interface": "public", "region": "R", "url": urls.get(each, "x")}],
                }
                for each in ("compute", "network", "image", "volumev3")
            ]
        }

    def test_versions_are_those_that_requests_are_made_for(self) -> None:
        for urls in (
            {"compute": "http://n/v2.1", "network": "http://u:9696/", "image": "http://g"},
            {"compute": "http://n/v2.1/", "network": "http://u:9696/v2.0", "image": "http://g/v2"},
            {"compute": "http://n/v2", "network": "http://u:9696", "image": "http://g/v2.9/"},
        ):
            urls["volumev3"] = "http://v/v3/p"
            self.assertEqual(
                endpoints(self.token(**urls), "", "public"),
                {
                    "compute": "http://n/v2.1",
                    "network": "http://u:9696",
                    "image": "http://g",
                    "volume": "http://v/v3/p",
                },
            )
        project = {"compute": "http://n/v2/0123", "network": "u", "image": "g"}
        self.assertEqual(endpoints(self.token(**project), "R", "public")["compute"], "http://n/v2.1/0123")

    def test_cinder_may_have_either_of_its_types_or_not_be_there(self) -> None:
        token = self.token(volumev3="http://v/v2/p")
        self.assertEqual(endpoints(token, "R", "public")["volume"], "http://v/v3/p")
        official: Any = json.loads(json.dumps(token).replace("volumev3", "block-storage"))
        self.assertEqual(endpoints(official, "R", "public")["volume"], "http://v/v3/p")
        none: Any = json.loads(json.dumps(token).replace("volumev3", "volumev2"))
        self.assertNotIn("volume", endpoints(none, "R", "public"))

    def test_a_service_that_is_not_there_once_is_named_with_the_regions(self) -> None:
        for region, interface in (("S", "public"), ("R", "admin")):
            with self.assertRaises(CloudError) as caught:
                endpoints(self.token(), region, interface)
            self.assertIs(caught.exception.kind, ErrorKind.CREDENTIALS)
            self.assertIn(f"{interface} endpoint of compute", str(caught.exception))
        two: Token = {"catalog": nova_resources.catalog("https://127.0.0.1")}  # type: ignore[typeddict-item]
        with self.assertRaises(CloudError) as caught:
            endpoints(two, "", "public")
        self.assertIn("Elsewhere, RegionOne", str(caught.exception))


class SizeTests(SynchronousTestCase):
    def flavors(self, **image: int) -> list[str]:
        every = cast(list[Flavor], nova_resources.flavors())
        gibs = {name: image.pop(name, 0) for name in ("disk_gib", "diskless_gib")}
        return [each["name"] for each in usable(every, cast(Any, image), **gibs)]

    def test_flavors_that_can_not_boot_the_image_are_left_out(self) -> None:
        self.assertNotIn("m1.diskless", self.flavors())
        self.assertIn("m1.diskless", self.flavors(disk_gib=1))
        self.assertIn("m1.diskless", self.flavors(diskless_gib=1))
        self.assertNotIn("m1.tiny", self.flavors(min_disk=8, diskless_gib=8))
        self.assertIn("m1.tiny", self.flavors(min_disk=8, disk_gib=8))
        self.assertEqual(self.flavors(min_disk=8)[0], "m1.small")
        self.assertEqual(self.flavors(min_ram=4096)[0], "m1.medium")
        self.assertNotIn("m1.diskless", self.flavors(disk_gib=1, min_ram=2048))

    def test_gpus_are_those_of_the_extra_specs(self) -> None:
        by_name = {each["name"]: each for each in cast(list[Flavor], nova_resources.flavors())}
        for name, aliases, gpus in (
            ("m1.small", ("*",), 0),
            ("g1.large", ("*",), 3),
            ("g1.large", ("a100",), 1),
            ("g1.large", (), 0),
            ("v1.large", ("*",), 1),
        ):
            found = offer(by_name[name], "x86_64", aliases, {})
            self.assertEqual(found.gpus, gpus, name)
            self.assertEqual((found.price, found.cpu_millis % 1000), (None, 0))


class SampleTests(SynchronousTestCase):
    """Nova's own samples of its API are understood."""

    def test_a_server_of_a_sample(self) -> None:
        words = {"isotime": "2026-11-24T01:02:03Z", "ip": "10.0.0.4", "id": nova_resources.new_id()}
        text = nova_schemas.sample("servers/v2.63/server-get-resp")
        text = re.sub(r"%\((\w+)\)s", lambda found: words.get(found[1], "x"), text)
        cloud: Any = OpenStackCloud(structure(GOOD, Settings, source="test"), CONTEXT)
        found = cloud._vm(json.loads(text)["server"])
        self.assertIs(found.state, InstanceState.RUNNING)
        self.assertEqual((found.id, found.private_address), (words["id"], "10.0.0.4"))
        self.assertEqual((found.size, found.public_address), ("m1.tiny.specs", ""))
        self.assertEqual(found.created_at, 1795482123.0)

    def test_every_status_that_nova_shows_is_one_of_a_vm_that_lives_or_has_ended(self) -> None:
        cloud: Any = OpenStackCloud(structure(GOOD, Settings, source="test"), CONTEXT)
        schema = nova_schemas.schemas().modules["servers"]["show_response"].schema
        shown = schema["properties"]["server"]["properties"]["status"]
        states = {status: cloud._vm({"id": "x", "status": status}).state for status in shown["enum"]}
        ended = {status for status, state in states.items() if state is InstanceState.ENDED}
        self.assertEqual(
            ended,
            {"DELETED", "ERROR", "SHELVED", "SHELVED_OFFLOADED", "SHUTOFF", "SOFT_DELETED", "SUSPENDED"},
        )
        for status in ("MIGRATING", "UNKNOWN", "BUILD", "PAUSED"):
            self.assertIs(states[status], InstanceState.PENDING, status)


class JudgeTests(SynchronousTestCase):
    """The checks of requests to the simulated OpenStack detect faulty ones."""

    def test_requests_and_answers_of_nova(self) -> None:
        schemas = nova_schemas.schemas()
        body: dict[str, Any] = {"server": {"name": "x", "flavorRef": "1", "networks": "auto"}}
        self.assertEqual(schemas.wrong_request("POST", "/servers", {}, body), [])
        for key, value in (
            ("tags", ["a/b"]),
            ("user_data", "!"),
            ("metadata", {"key": "x" * 256}),
            ("networks", [{"id": "x"}]),
            ("clientToken", "x"),
        ):
            wrong = schemas.wrong_request("POST", "/servers", {}, {"server": {**body["server"], key: value}})
            self.assertEqual(len(wrong), 1, key)
        server = f"/servers/{nova_resources.new_id()}"
        self.assertTrue(schemas.wrong_answer("GET", server, {"server": {"id": "x"}}))
        self.assertTrue(schemas.wrong_answer("GET", "/servers/detail", {"servers": [{}]}))

    def test_requests_and_answers_of_neutron(self) -> None:
        wrong, address = neutron_attributes.wrong, {"floating_network_id": "x", "port_id": "x"}
        self.assertEqual(wrong("POST", "floatingips", {}, {"floatingip": address}), [])
        self.assertEqual(wrong("GET", "ports", {"device_id": "x", "fields": "id"}, {}), [])
        self.assertTrue(wrong("POST", "floatingips", {}, {"floatingip": {**address, "tags": ["x"]}}))
        self.assertTrue(wrong("PUT", "floatingips", {}, {"floatingip": address}))
        self.assertTrue(wrong("GET", "ports", {"device": "x"}, {}))
        self.assertTrue(neutron_attributes.wrong_answer("ports", {"ports": [{"server": "x"}]}))

    def test_requests_for_tokens_and_what_no_access_rule_allows(self) -> None:
        self.assertTrue(keystone_rules.wrong({"auth": {"identity": {"methods": "password"}}}))
        self.assertTrue(keystone_rules.allows("compute", "DELETE", "/v2.1/servers/1"))
        self.assertFalse(keystone_rules.allows("compute", "DELETE", "/v2.1/servers/1/tags"))
        self.assertFalse(keystone_rules.allows("network", "POST", "/v2.0/networks"))


class SettingsTests(SynchronousTestCase):
    def test_it_is_a_cloud(self) -> None:
        cloud: Cloud[Driver] = OpenStackCloud(structure(GOOD, Settings, source="test"), CONTEXT)
        self.assertIsInstance(cloud, Cloud)

    def test_it_is_registered(self) -> None:
        made = registry.create(cast(IReactor, Clock()), "openstack", GOOD, CONTEXT)
        self.assertEqual(made.name, "openstack")

    def test_wrong_settings_are_named(self) -> None:
        for key, value in (
            ("cloud", ""),
            ("image", ""),
            ("image", "a b"),
            ("network", "a/b"),
            ("network", ""),
            ("zones", ["a b"]),
            ("security_groups", ["a,b"]),
            ("server_group", "a name"),
            ("image_projects", ["a name"]),
            ("disk_gib", -1),
            ("threads", 0),
            ("clouds", "/x"),
        ):
            table = {**GOOD, key: value}
            error = self.assertRaises(ConfigError, registry.create, Clock(), "openstack", table, CONTEXT)
            self.assertIn(key, str(error))
