# SPDX-License-Identifier: Apache-2.0
"""Each call is routed to its owner, and calls to the delegate pass unchanged in both directions."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import SynchronousTestCase

from infranetes.delegate.channel import IMAGES as THEIR_IMAGES
from infranetes.delegate.channel import Delegate, DelegateState
from infranetes.delegate.routes import ROUTES, Route
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri
from tests.infranetes.delegate.case import IMAGES, OURS, RUNTIME, RouterCase, reactor
from tests.support.delegate import UNKNOWN, new_id
from tests.support.waiting import until
from tests.txgrpc.support import drain_iterator, status_of
from txgrpc import Code, GrpcError
from txgrpc.service import Method

METHODS = [
    Method.from_descriptor(each)
    for service in (cri.RuntimeService, cri.ImageService)
    for each in service.methods
]
BY_ID = (Route.SANDBOX, Route.CONTAINER)
ANSWER = b"\x0a\x03yes" + UNKNOWN


class TableTests(SynchronousTestCase):
    """The table of routes is the CRI's list of RPCs."""

    def test_every_rpc_of_both_services_has_a_route_and_no_other_has(self) -> None:
        self.assertEqual(set(ROUTES), {method.path for method in METHODS})

    def test_an_id_is_in_field_1_and_the_handler_in_field_2(self) -> None:
        names = {Route.SANDBOX: "pod_sandbox_id", Route.CONTAINER: "container_id"}
        for method in METHODS:
            fields = {field.number: field.name for field in method.request_class.DESCRIPTOR.fields}
            route = ROUTES[method.path]
            if route in names:
                self.assertEqual(fields[1], names[route], method.path)
            elif route is Route.HANDLER:
                self.assertEqual(fields[2], "runtime_handler")
            elif route is Route.IMAGE:
                self.assertEqual(fields[1], "image")
            else:
                self.assertNotIn(fields.get(1), names.values(), method.path)

    def test_all_that_streams_is_a_list_or_events(self) -> None:
        streaming = {ROUTES[method.path] for method in METHODS if method.server_streaming}
        self.assertEqual(streaming, {Route.PAGES, Route.EVENTS})


class RouteTests(RouterCase):
    """From kubelet's bytes to the delegate's, and back."""

    async def test_what_is_the_delegates_passes_unchanged(self) -> None:
        request = b"\x0a\x40" + new_id().encode() + UNKNOWN
        singles = [
            method for method in METHODS if ROUTES[method.path] in (*BY_ID, Route.HANDLER, Route.DELEGATE)
        ]
        for method in singles:
            self.theirs.answers[method.name] = lambda _: ANSWER
            self.assertEqual(await self.raw.call(method.path, request, timeout=60), ANSWER, method.name)
        self.assertEqual(self.theirs.requests, [(method.name, request) for method in singles])
        for name in ("PullImage", "ImageStatus", "RemoveImage"):
            self.theirs.answers[name] = lambda _: ANSWER
            image = cri.PullImageRequest(image=cri.ImageSpec(image="web:1")).SerializeToString() + UNKNOWN
            self.assertEqual(await self.raw.call(f"{IMAGES}/{name}", image, timeout=60), ANSWER)
            self.assertEqual(self.theirs.requests[-1], (name, image))
        self.assertEqual(self.ours.requests, [])

    async def test_what_is_ours_never_comes_to_the_delegate(self) -> None:
        for method in METHODS:
            if ROUTES[method.path] in BY_ID:
                request = b"\x0a\x20" + OURS.encode() + UNKNOWN
                self.assertEqual(await self.raw.call(method.path, request, timeout=60), b"")
        run = cri.RunPodSandboxRequest(runtime_handler="infranetes")
        self.ours.answers["RunPodSandbox"] = cri.RunPodSandboxResponse(pod_sandbox_id=OURS)
        self.assertEqual((await self.stub.RunPodSandbox(run, timeout=60)).pod_sandbox_id, OURS)
        image = cri.ImageSpec(image="aws.infranetes.io/web")
        await self.images.PullImage(cri.PullImageRequest(image=image), timeout=60)
        self.assertEqual(self.theirs.requests, [])
        self.assertEqual(
            self.ours.requests[-2:],
            [("RunPodSandbox", run), ("PullImage", cri.PullImageRequest(image=image))],
        )
        ids = {
            getattr(request, "pod_sandbox_id", None) or request.container_id
            for _, request in self.ours.requests[:-2]
        }
        self.assertEqual(ids, {OURS})

    async def test_our_own_errors_are_told_as_ever(self) -> None:
        self.ours.answers["StopPodSandbox"] = GrpcError(Code.FAILED_PRECONDITION, "not now")
        error = await status_of(
            self.stub.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=OURS), timeout=60)
        )
        self.assertEqual((error.code, error.message), (Code.FAILED_PRECONDITION, "not now"))

    async def test_a_request_that_is_no_message_is_refused(self) -> None:
        error = await status_of(self.raw.call(f"{RUNTIME}/StopPodSandbox", b"\xff\xff", timeout=60))
        self.assertEqual(error.code, Code.INVALID_ARGUMENT)
        broken = b"\x0a\x20" + OURS.encode() + b"\x12\x00\x1a"
        error = await status_of(self.raw.call(f"{RUNTIME}/StopPodSandbox", broken, timeout=60))
        self.assertEqual((error.code, self.theirs.requests), (Code.INVALID_ARGUMENT, []))

    async def test_the_delegates_status_metadata_and_deadline_pass(self) -> None:
        details = ("grpc-status-details-bin", b"\x08\x05")
        self.theirs.errors["StopContainer"] = GrpcError(Code.ABORTED, "bit by bit", (details,))
        call = self.stub.StopContainer(
            cri.StopContainerRequest(container_id=new_id()), timeout=60, metadata=[("traceparent", "00-1")]
        )
        error = await status_of(call)
        self.assertEqual((error.code, error.message), (Code.ABORTED, "bit by bit"))
        self.assertIn(details, error.metadata)
        (seen,) = self.theirs.calls
        self.assertIn(("traceparent", "00-1"), seen.metadata)
        self.assertIsNotNone(seen.deadline)

    async def test_a_call_that_its_caller_gives_up_is_given_up_at_the_delegate(self) -> None:
        self.theirs.hang("ExecSync")
        waiting = self.stub.ExecSync(cri.ExecSyncRequest(container_id=new_id()), timeout=60)
        await until(lambda: bool(self.theirs.hanging["ExecSync"]), "the delegate is asked")
        waiting.cancel()
        self.assertEqual((await status_of(waiting)).code, Code.CANCELLED)
        await until(lambda: self.theirs.cancelled == ["ExecSync"], "it is given up")

    async def test_large_messages_pass(self) -> None:
        blob = b"\x0a\x40" + new_id().encode() + b"\x12\x80\x80\xc0\x06" + bytes(13 * 1024 * 1024)
        self.theirs.answers["CreateContainer"] = lambda request: request
        self.assertTrue(await self.raw.call(f"{RUNTIME}/CreateContainer", blob, timeout=100) == blob)

    async def test_rpcs_of_a_newer_cri_are_the_delegates(self) -> None:
        """Unknown RPCs of the CRI are passed on. Those of other services are not."""
        error = await status_of(self.raw.call(f"{RUNTIME}/NewCall", b"\x0a\x01x", timeout=60))
        self.assertEqual(error.code, Code.UNIMPLEMENTED)
        self.assertIn("does not offer NewCall", error.message)
        error = await status_of(self.raw.call("/runtime.v1.NewService/Call", b"", timeout=60))
        self.assertIn("there is no service for /runtime.v1.NewService", error.message)
        error = await status_of(
            self.raw.call("/runtime.v1alpha2.RuntimeService/ListPodSandbox", b"", timeout=60)
        )
        self.assertEqual(error.code, Code.UNIMPLEMENTED)

    async def test_what_the_delegate_does_not_offer_it_says_itself(self) -> None:
        self.theirs.errors["RuntimeConfig"] = GrpcError(Code.UNIMPLEMENTED, "unknown method RuntimeConfig")
        error = await status_of(self.stub.RuntimeConfig(cri.RuntimeConfigRequest(), timeout=60))
        self.assertEqual((error.code, error.message), (Code.UNIMPLEMENTED, "unknown method RuntimeConfig"))

    async def test_nobody_can_hide_a_pod(self) -> None:
        """The label of the runtime's own sandboxes is reserved."""
        config = cri.PodSandboxConfig(labels={"infranetes.io/shadow-of": OURS})
        error = await status_of(self.stub.RunPodSandbox(cri.RunPodSandboxRequest(config=config), timeout=60))
        self.assertEqual((error.code, self.theirs.requests), (Code.INVALID_ARGUMENT, []))


class DownTests(RouterCase):
    """The delegate goes down, and comes back."""

    async def test_ours_goes_on_and_theirs_fails_in_one_sentence(self) -> None:
        await self.theirs.down()
        for call in (
            self.stub.Version(cri.VersionRequest(), timeout=60),
            self.stub.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=60),
            self.stub.Status(cri.StatusRequest(), timeout=60),
            self.stub.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=new_id()), timeout=60),
            drain_iterator(self.stub.StreamPodSandboxes(cri.StreamPodSandboxesRequest(), timeout=60)),
        ):
            error = await status_of(call)
            self.assertIs(error.code, Code.UNAVAILABLE)
            self.assertIn(f"the delegate at {self.theirs.path} does not answer: ", error.message)
        await self.stub.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=OURS), timeout=60)
        await self.stub.RunPodSandbox(cri.RunPodSandboxRequest(runtime_handler="infranetes"), timeout=60)
        self.assertIs(self.delegate.state, DelegateState.DOWN)

    async def test_one_that_is_restarted_is_found_again(self) -> None:
        await self.stub.Version(cri.VersionRequest(), timeout=60)
        self.assertEqual((self.delegate.state, self.delegate.trouble), (DelegateState.UP, ""))
        await self.theirs.down()
        await status_of(self.stub.Version(cri.VersionRequest(), timeout=60))
        await self.theirs.start()
        while self.delegate.state is not DelegateState.UP:
            try:
                await self.stub.Version(cri.VersionRequest(), timeout=60)
            except GrpcError as error:
                self.assertIs(error.code, Code.UNAVAILABLE)

    async def test_calls_in_flight_end_when_it_dies_and_are_not_made_twice(self) -> None:
        self.theirs.hang("ExecSync")
        request = cri.ExecSyncRequest(container_id=new_id())
        calls = [start(status_of(self.stub.ExecSync(request, timeout=60))) for _ in range(50)]
        await until(lambda: len(self.theirs.hanging["ExecSync"]) == 50, "all are there")
        await self.theirs.down()
        errors: Any = await gatherResults(calls)
        self.assertEqual({error.code for error in errors}, {Code.UNAVAILABLE})
        self.assertEqual(len(self.theirs.requests), 50)

    async def test_a_refused_one_takes_its_own_calls_and_no_pod_that_needs_it_begins(self) -> None:
        self.delegate.refuse(THEIR_IMAGES, "containerd deletes layers")
        run = cri.RunPodSandboxRequest(runtime_handler="infranetes")
        error = await status_of(self.stub.RunPodSandbox(run, timeout=60))
        self.assertEqual((error.code, error.message), (Code.FAILED_PRECONDITION, "containerd deletes layers"))
        await self.stub.RunPodSandbox(cri.RunPodSandboxRequest(), timeout=60)
        await self.stub.RunPodSandbox(cri.RunPodSandboxRequest(runtime_handler="machines"), timeout=60)
        await self.stub.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=OURS), timeout=60)
        self.delegate.refuse(THEIR_IMAGES, "")
        await self.stub.RunPodSandbox(run, timeout=60)

    async def test_it_is_met_once_it_answers(self) -> None:
        await self.theirs.down()
        meeting = start(self.delegate.meet())
        await until(lambda: self.delegate.state is DelegateState.DOWN, "it is told that it is away")
        await self.theirs.start()
        await meeting
        self.assertEqual((self.delegate.kind, self.delegate.version), ("containerd", "2.1.0"))

    async def test_what_to_do_about_a_socket_that_is_none_or_nobodys(self) -> None:
        await self.theirs.down()
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(self.theirs.path)
        stale.close()
        for path, why in (
            (self.theirs.path, "nobody listens there"),
            (os.path.dirname(self.theirs.path), "that is no socket"),
            (f"{self.theirs.path}.old", "there is no such socket"),
        ):
            delegate = Delegate(reactor, path, "/etc/x.toml")
            self.addCleanup(delegate.stop)
            error = await self.assertFailure(start(delegate.call("/runtime.v1.X/Y", b"")), Unavailable)
            self.assertEqual(
                str(error),
                f"the delegate at {path} does not answer: {why}; start it, or name its socket as "
                "delegate.socket in /etc/x.toml",
            )
        os.unlink(self.theirs.path)

    async def test_what_to_do_about_a_server_that_is_no_runtime(self) -> None:
        """Such as containerd without its CRI plugin. Once it has one, it is accepted."""
        words = "unknown service runtime.v1.RuntimeService"
        for name in ("Version", "Status"):
            self.theirs.errors[name] = GrpcError(Code.UNIMPLEMENTED, words)
        meeting = start(self.delegate.meet())
        await until(lambda: "offers no CRI" in self.delegate.trouble, "it is told")
        error = await status_of(self.stub.Status(cri.StatusRequest(), timeout=60))
        self.assertEqual((error.code, error.message), (Code.UNIMPLEMENTED, self.delegate.trouble))
        expected = f"what listens at {self.theirs.path} offers no CRI ({words}): name containerd's or CRI-O's"
        self.assertIn(expected, error.message)
        self.assertIn("disabled_plugins", error.message)
        self.theirs.errors.clear()
        await meeting
        self.assertEqual(self.delegate.trouble, "")

    async def test_one_that_comes_back_is_met_again(self) -> None:
        """It may be of another release, or not a runtime any more."""
        self.delegate.start()
        await until(lambda: self.delegate.version == "2.1.0", "it is met")
        newer = cri.VersionResponse(runtime_name="containerd", runtime_version="2.2.0").SerializeToString()
        self.theirs.answers["Version"] = lambda _: newer
        await self.restarted()
        await until(lambda: self.delegate.version == "2.2.0", "it is met again")
        for name in ("Version", "Status"):
            self.theirs.errors[name] = GrpcError(Code.UNIMPLEMENTED, "unknown service")
        await self.restarted()
        await until(lambda: "offers no CRI" in self.delegate.trouble, "it is met as no runtime")

    async def restarted(self) -> None:
        """Restart the delegate, and have the daemon notice that through kubelet's calls."""
        await self.theirs.down()
        await status_of(self.stub.Status(cri.StatusRequest(), timeout=60))
        self.assertIs(self.delegate.state, DelegateState.DOWN)
        await self.theirs.start()
        while self.delegate.state is DelegateState.DOWN:
            with contextlib.suppress(GrpcError):
                await self.stub.Status(cri.StatusRequest(), timeout=60)
