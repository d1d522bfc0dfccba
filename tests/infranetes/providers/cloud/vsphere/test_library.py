# SPDX-License-Identifier: Apache-2.0
"""Items of a content library as images of VM-image pods."""

from __future__ import annotations

import json
import ssl
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.deployments import LIBRARY_ITEM, deploying_name
from infranetes.providers.cloud.vsphere.rest import Answer, Rest
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes_common.config import structure
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from tests.contract.pod_provider_case import reactor
from tests.harness.durations import slow
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.vsphere.case import SETTINGS, VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.library import DEPLOY, FIND, ITEM, LOGIN, ContentLibrary


class LibraryCase(VsphereCase):
    """Base class: a library for each test."""

    def setUp(self) -> Any:
        result = super().setUp()
        self.library = ContentLibrary(self.world.vcsim, f"library {self.world.folder}")
        self.settings["content_library"] = self.library.name
        return result

    async def finish(self) -> None:
        self.library.remove()
        await super().finish()

    def put_template(self, name: str) -> str:
        """Add an item that is a VM template."""
        source = self.world.vcsim.find(f"vm/{vcsim.BARE}")
        return self.library.put_template(name, source, self.world.inventory.CreateFolder("library"))

    def made(self) -> list[str]:
        """Return the names in the folder of images."""
        return sorted(vm.name for vm in self.world.images.childEntity)

    def template(self, name: str) -> Any:
        found = self.world.vcsim.find(f"vm/{self.world.folder}/images/{name}")
        self.assertTrue(found.config.template, f"{name} is a template")
        return found

    def asked(self, action: str) -> int:
        return len(self.world.asked(action))

    async def pulled(self, provider: Any, name: str) -> Any:
        return await self.within(provider.catalogue.find(name, {}))

    async def had(self, provider: Any, name: str) -> Any:
        """Pull as kubelet does, which retries."""
        until = reactor.seconds() + self.call_timeout
        while True:
            try:
                return await self.pulled(provider, name)
            except Unavailable:
                if reactor.seconds() > until:
                    raise
                await self.sleep(0.05)


@needs_tools("vcsim")
class PullTests(LibraryCase, TestCase):
    """Pulls of images that image_folder lacks."""

    async def test_an_ovf_becomes_a_template_for_pods(self) -> None:
        item = self.library.put_ovf("web-1.0")
        provider: Any = await self.started()
        found = await self.pulled(provider, "vsphere.infranetes.io/web:1.0")
        template = self.template("web-1.0")
        self.assertEqual(found.machine, template.config.instanceUuid)
        self.assertEqual(found.names, ("web:1.0",))
        tags = vcsim.extra_config(template)
        self.assertEqual((tags["infranetes.image_name"], tags[LIBRARY_ITEM]), ("web:1.0", item))
        self.assertEqual(template.runtime.powerState, "poweredOff")
        self.assertTrue(await self.within(provider.catalogue.present(found)))
        instance = await self.running(provider, self.spec(image=found.machine))
        await self.agent_info(instance)
        clone = self.world.asked("CloneVM_Task")[-1]
        self.assertEqual(clone["this"], template._moId)
        self.assertIn("createNewChildDiskBacking", clone["body"])

    async def test_a_vm_template_becomes_a_template_for_pods(self) -> None:
        self.put_template("web-1.0")
        provider = await self.started()
        found = await self.pulled(provider, "web:1.0")
        template = self.template("web-1.0")
        self.assertEqual(found.machine, template.config.instanceUuid)
        self.assertIsNotNone(template.snapshot)
        await self.running(provider, self.spec(image=found.machine))
        self.assertEqual(self.world.asked("CloneVM_Task")[-1]["this"], template._moId)

    async def test_a_second_pull_does_not_ask_the_library(self) -> None:
        self.library.put_ovf("web-1.0")
        provider = await self.started()
        first = await self.pulled(provider, "web:1.0")
        looked = self.asked(FIND)
        self.assertEqual(await self.pulled(provider, "web:1.0"), first)
        self.assertEqual((self.asked(DEPLOY), self.asked(FIND)), (1, looked))
        self.assertEqual(self.made(), ["web-1.0"])

    async def test_concurrent_pulls_deploy_once(self) -> None:
        self.library.put_ovf("web-1.0")
        self.world.rest.held = Deferred()
        provider = await self.started()
        pulls = [self.pulled(provider, "web:1.0") for _ in range(3)]
        waiting = gatherResults([Deferred.fromCoroutine(pull) for pull in pulls])
        await self.until(lambda: self.asked(DEPLOY), "a deploy is asked for")
        self.world.rest.release()
        found = await self.within(waiting)
        self.assertEqual(found, [found[0]] * 3)
        self.assertEqual(self.asked(DEPLOY), 1)
        self.assertEqual(self.made(), ["web-1.0"])

    async def test_a_name_with_slashes(self) -> None:
        self.library.put_ovf("team/web-1.0")
        provider = await self.started()
        found = await self.pulled(provider, "team/web:1.0")
        [made] = self.world.images.childEntity
        self.assertEqual(found.machine, made.config.instanceUuid)
        self.assertEqual(vcsim.extra_config(made)["infranetes.image_name"], "team/web:1.0")
        self.assertEqual(await self.pulled(provider, "team/web:1.0"), found)

    async def test_the_datastore_of_the_configuration(self) -> None:
        [datastore] = self.world.vcsim.find("datastore").childEntity
        self.settings["datastore"] = datastore.name
        self.library.put_ovf("web-1.0")
        self.put_template("app-1.0")
        provider = await self.started()
        for name in ("web:1.0", "app:1.0"):
            await self.pulled(provider, name)
        for one in self.world.asked(DEPLOY):
            self.assertIn(datastore._moId, one["body"])

    async def test_a_missing_item(self) -> None:
        self.library.put_ovf("web-1.0")
        provider: Any = await self.started()
        error = str(await self.refused(NotFound, provider.catalogue.find("web:2.0", {})))
        self.assertIn(self.library.name, error)
        self.assertIn("web-2.0", error)

    async def test_an_item_of_another_type(self) -> None:
        self.library.put("web-1.0", "iso")
        provider: Any = await self.started()
        error = str(await self.refused(InvalidArgument, provider.catalogue.find("web:1.0", {})))
        self.assertIn("web-1.0", error)
        self.assertIn("'iso'", error)
        self.assertEqual(self.asked(DEPLOY), 0)

    async def test_another_vm_with_the_templates_name_is_left_alone(self) -> None:
        self.library.put_ovf("web-1.0")
        provider: Any = await self.started()
        await self.pulled(provider, "web:1.0")
        theirs = self.template("web-1.0")
        theirs.MarkAsVirtualMachine(self.world.vcsim.find(f"host/{vcsim.POOLS[0]}"), None)
        self.world.vcsim.reconfigure(theirs, {"infranetes.image_name": "", LIBRARY_ITEM: ""})
        error = str(await self.refused(InvalidArgument, provider.catalogue.find("web:1.0", {})))
        self.assertIn("images", error)
        self.assertFalse(theirs.config.template)
        self.assertEqual(self.asked(DEPLOY), 1)

    async def test_a_vapp_is_refused_and_deleted(self) -> None:
        item = self.library.put_ovf("web-1.0")
        self.world.rest.vapps = True
        provider: Any = await self.started()
        error = str(await self.refused(InvalidArgument, provider.catalogue.find("web:1.0", {})))
        self.assertIn("vApp", error)
        self.assertEqual(self.asked("Destroy_Task"), 1)
        self.assertEqual(self.made(), [])
        self.assertIsNone(self.world.vcsim.find(f"host/{vcsim.POOLS[0]}/{deploying_name(item)}"))

    async def test_two_nodes_make_one_template(self) -> None:
        self.library.put_ovf("web-1.0")
        self.put_template("app-1.0")
        nodes = [await self.started(), await self.started(node="node-2")]

        for name in ("web:1.0", "app:1.0"):
            asked = self.asked(DEPLOY)
            self.world.rest.held = Deferred()
            pulls = gatherResults([Deferred.fromCoroutine(self.had(node, name)) for node in nodes])
            while self.asked(DEPLOY) < asked + 2:
                await self.sleep(0.02)
            self.world.rest.release()
            found = await self.within(pulls)
            self.assertEqual(found[0], found[1])
        self.assertEqual(self.made(), ["app-1.0", "web-1.0"])


@needs_tools("vcsim")
class BrokenOffTests(LibraryCase, TestCase):
    """Deployments that take long or fail, or whose answer is lost."""

    async def test_a_slow_deployment_serves_a_later_pull(self) -> None:
        self.settings["call_seconds"] = 2.0
        self.library.put_ovf("web-1.0")
        self.world.rest.held = Deferred()
        provider: Any = await self.started()
        for _ in range(2):
            error = str(await self.refused(Unavailable, provider.catalogue.find("web:1.0", {})))
            self.assertIn("being deployed", error)
        self.assertEqual(await self.within(provider.list()), [])
        self.world.rest.release()
        await self.had(provider, "web:1.0")
        self.assertEqual(self.asked(DEPLOY), 1)
        self.assertEqual(self.made(), ["web-1.0"])

    @slow(5, "a deployment is broken off at each of four steps, and the next daemon goes on")
    async def test_a_daemon_that_is_killed_before_the_template_is_finished(self) -> None:
        """The next daemon's pull takes the steps that are left."""
        self.settings["retry_seconds"] = 0.5
        for number, step in enumerate(
            ("ReconfigVM_Task", "CreateSnapshot_Task", "Rename_Task", "MarkAsTemplate")
        ):
            item = self.library.put_ovf(f"web-{number}")
            provider: Any = await self.started()
            self.world.faults.add(FaultKind.ERROR, step)
            await self.refused(Unavailable, provider.catalogue.find(f"web:{number}", {}))
            left = f"web-{number}" if step == "MarkAsTemplate" else deploying_name(item)
            self.assertIn(left, self.made())
            self.assertFalse(self.world.vcsim.find(f"vm/{self.world.folder}/images/{left}").config.template)
            self.world.faults.clear()
            await self.pulled(await self.restarted(provider), f"web:{number}")
            self.template(f"web-{number}")
            self.assertEqual(self.asked(DEPLOY), number + 1)
        self.assertEqual(self.made(), [f"web-{number}" for number in range(4)])

    async def test_nodes_that_finish_the_same_vm(self) -> None:
        self.settings["retry_seconds"] = 0.5
        self.library.put_ovf("web-1.0")
        provider: Any = await self.started()
        self.world.faults.add(FaultKind.ERROR, "ReconfigVM_Task")
        await self.refused(Unavailable, provider.catalogue.find("web:1.0", {}))
        self.world.faults.clear()
        nodes = [await self.started(node=f"node-{number}") for number in range(3)]
        pulls = [Deferred.fromCoroutine(self.had(node, "web:1.0")) for node in nodes]
        found = await self.within(gatherResults(pulls))
        self.assertEqual(found, [found[0]] * 3)
        self.template("web-1.0")
        self.assertEqual((self.made(), self.asked(DEPLOY)), (["web-1.0"], 1))

    async def test_a_vm_whose_disks_are_being_filled_is_waited_for(self) -> None:
        """vCenter shows a deployment like this when an earlier daemon has begun it."""
        self.library.put_ovf("web-1.0")
        self.world.faults.add(FaultKind.BUSY, "ReconfigVM_Task")
        provider: Any = await self.started()
        for _ in range(2):
            error = str(await self.refused(Unavailable, provider.catalogue.find("web:1.0", {})))
            self.assertIn("try again", error)
        self.world.faults.clear()
        await self.pulled(provider, "web:1.0")
        self.assertEqual(self.asked(DEPLOY), 1)
        self.assertEqual(self.made(), ["web-1.0"])

    async def test_lost_answers_of_a_deployment(self) -> None:
        for kind, name in ((FaultKind.LOST, "web"), (FaultKind.ACTED, "app"), (FaultKind.STALE, "db")):
            self.library.put_ovf(f"{name}-1.0")
            fault = self.world.faults.add(kind, DEPLOY, times=1)
            provider = await self.started()
            await self.pulled(provider, f"{name}:1.0")
            self.template(f"{name}-1.0")
            self.assertEqual(fault.happened, 1)
        self.assertEqual(self.asked(DEPLOY), 3)

    async def test_a_refused_deployment_leaves_nothing(self) -> None:
        self.library.put_ovf("web-1.0", fit=False)
        provider: Any = await self.started()
        error = str(await self.refused(InvalidArgument, provider.catalogue.find("web:1.0", {})))
        self.assertIn("'web-1.0'", error)
        self.assertIn("unsupported resource type", error)
        self.assertEqual(self.made(), [])

    async def test_what_a_failed_deployment_leaves_is_deleted(self) -> None:
        self.library.put_ovf("web-1.0")
        fault = self.world.faults.add(FaultKind.QUOTA, DEPLOY, times=1)
        provider: Any = await self.started()
        error = str(await self.refused(InvalidArgument, provider.catalogue.find("web:1.0", {})))
        self.assertIn("The disk could not be filled.", error)
        self.assertEqual((fault.happened, self.asked("Destroy_Task")), (1, 1))
        self.assertEqual(self.made(), [])
        await self.pulled(provider, "web:1.0")
        self.assertEqual(self.made(), ["web-1.0"])

    async def test_a_failure_that_nobody_waited_for_is_reported_to_the_next_pull(self) -> None:
        self.settings["call_seconds"] = 1.0
        self.library.put_ovf("web-1.0", fit=False)
        self.world.rest.held = Deferred()
        provider: Any = await self.started()
        await self.refused(Unavailable, provider.catalogue.find("web:1.0", {}))
        self.world.rest.release()
        for _ in range(100):
            error = await self.assertFailure(
                provider.catalogue.find("web:1.0", {}), Unavailable, InvalidArgument
            )
            if isinstance(error, InvalidArgument):
                break
        self.assertIn("unsupported resource type", str(error))
        self.assertEqual(self.asked(DEPLOY), 1)


@needs_tools("vcsim")
class RequestTests(LibraryCase, TestCase):
    """The REST interface: faults, sessions, secrets."""

    async def test_recovers_from_throttling_and_errors(self) -> None:
        self.library.put_ovf("web-1.0")
        faults = [
            self.world.faults.add(kind, action, times=1)
            for kind, action in (
                (FaultKind.THROTTLE, FIND),
                (FaultKind.ERROR, ITEM),
                (FaultKind.LOST, LOGIN),
                (FaultKind.THROTTLE, DEPLOY),
            )
        ]
        await self.pulled(await self.started(), "web:1.0")
        self.assertEqual([fault.happened for fault in faults], [1, 1, 1, 1])
        self.assertEqual(self.made(), ["web-1.0"])

    async def test_a_session_that_has_expired_is_renewed_once(self) -> None:
        self.settings["threads"] = 1
        self.library.put_ovf("web-1.0")
        provider: Any = await self.started()
        expired = self.world.faults.add(FaultKind.UNKNOWN, ITEM, times=1)
        await self.pulled(provider, "web:1.0")
        self.assertEqual(expired.happened, 1)
        self.world.faults.add(FaultKind.UNKNOWN, FIND)
        logins = self.asked(LOGIN)
        error = await self.refused(FailedPrecondition, provider.catalogue.find("web:2.0", {}))
        self.assertIn("credentials", str(error))
        self.assertEqual(self.asked(LOGIN), logins + 1)
        self.world.faults.clear()

    async def test_a_missing_privilege_is_reported(self) -> None:
        self.library.put_ovf("web-1.0")
        self.world.faults.add(FaultKind.REVOKED, DEPLOY)
        provider: Any = await self.started()
        error = str(await self.refused(FailedPrecondition, provider.catalogue.find("web:1.0", {})))
        self.assertIn("unauthorized", error)
        self.assertIn("web-1.0", error)
        self.assertEqual(self.asked(DEPLOY), 1)

    async def test_sessions_are_ended(self) -> None:
        self.library.put_ovf("web-1.0")
        provider = await self.started()
        await self.pulled(provider, "web:1.0")
        self.assertGreaterEqual(len(self.world.asked(LOGIN)), 2)
        self.assertTrue(self.world.rest.tokens)
        await self.within(provider.stop())
        self.assertEqual(self.world.rest.tokens, [])

    async def test_no_secret_is_in_a_url_or_a_message(self) -> None:
        self.library.put_ovf("web-1.0")
        provider = await self.started()
        await self.pulled(provider, "web:1.0")
        for one in self.world.requests:
            for secret in (vcsim.PASSWORD, *self.world.rest.tokens):
                self.assertNotIn(secret, one["this"])
        said = repr(provider.status()) + repr(vars(provider))
        for secret in (vcsim.PASSWORD, *self.world.rest.tokens):
            self.assertNotIn(secret, said)

    async def test_a_missing_library(self) -> None:
        self.settings["content_library"] = "nowhere"
        provider = self.make_provider()
        error = str(await self.refused(FailedPrecondition, provider.start(lambda words: None)))
        self.assertIn("content_library", error)
        self.assertIn("nowhere", error)
        self.settings["content_library"] = self.library.name

    async def test_an_untrusted_server_gets_no_password(self) -> None:
        host = self.world.table()["host"]
        for ca_file, kind in ((None, ssl.SSLCertVerificationError), (self.world.password, CloudError)):
            rest = Rest(host, vcsim.USER, self.world.password, ca_file, 5.0)
            await self.assertFailure(deferToThread(rest._thd_request, "GET", "/rest/x"), kind)
        self.assertEqual(self.world.requests, [])


class AnswerTests(SynchronousTestCase):
    """Answers of the REST interface."""

    def test_refusals(self) -> None:
        def kind(name: str) -> bytes:
            return json.dumps({"type": f"com.vmware.vapi.std.errors.{name}", "value": {}}).encode()

        for status, body, trouble in (
            (401, b"", ErrorKind.CREDENTIALS),
            (403, kind("unauthorized"), ErrorKind.CREDENTIALS),
            (404, kind("not_found"), ErrorKind.NOT_FOUND),
            (429, b"slow down", ErrorKind.THROTTLED),
            (400, kind("already_exists"), ErrorKind.CONFLICT),
            (400, kind("resource_busy"), ErrorKind.TRANSIENT),
            (400, kind("unable_to_allocate_resource"), ErrorKind.CAPACITY),
            (400, kind("invalid_argument"), ErrorKind.INVALID),
            (503, b"<html>", ErrorKind.TRANSIENT),
            (500, kind("error"), ErrorKind.TRANSIENT),
            (302, b"", ErrorKind.INVALID),
        ):
            error = self.assertRaises(CloudError, Answer(status, "7", body).value)
            self.assertIs(error.kind, trouble, f"{status} {body!r}")
            self.assertEqual(error.retry_after, 7.0)

    def test_messages_are_one_bounded_line(self) -> None:
        messages = [{"default_message": "first\nline", "id": "x"}, {"default_message": "z" * 5000}]
        body = json.dumps({"type": "com.vmware.vapi.std.errors.error", "value": {"messages": messages}})
        said = str(self.assertRaises(CloudError, Answer(400, "soon", body.encode()).value))
        self.assertTrue(said.startswith("400 error: first line; zzz"), said)
        self.assertLess(len(said), 500)

    def test_malformed_answers(self) -> None:
        for body in (
            b"<html>",
            b"[]",
            b'{"value": 1',
            b"[" * 100_000,
            b'{"value": "' + b"x" * (1 << 20) + b'"}',
        ):
            error = self.assertRaises(CloudError, Answer(200, "", body).value)
            self.assertIs(error.kind, ErrorKind.TRANSIENT)
        self.assertIsNone(Answer(200, "", b"").value())


class SettingsTests(SynchronousTestCase):
    def test_a_library_needs_a_folder(self) -> None:
        table = {**SETTINGS, "content_library": "images"}
        error = self.assertRaises(ConfigError, structure, table, Settings, source="test")
        self.assertIn("content_library", str(error))
        self.assertIn("image_folder", str(error))
        structure({**table, "image_folder": "templates"}, Settings, source="test")
