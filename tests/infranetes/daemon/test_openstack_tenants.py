# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods of two tenants on a simulated OpenStack: through the CRI, killed, with a credential
that is revoked."""

from __future__ import annotations

from typing import Any

from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.openstack import SimulatedOpenStack
from txgrpc import Code, GrpcError


@needs_tools("wheels")
@needs_registry
class OpenStackTenantDaemonTests(CloudDaemonCase):
    provider = "openstack"
    make_world = SimulatedOpenStack

    def setUp(self) -> None:
        super().setUp()
        self.tenants = {name: self.world.add_tenant(name) for name in ("acme", "globex")}
        table = self.config["providers"]["openstack"]
        table["tenants"] = {name: {"cloud": name, "network": name} for name in self.tenants}
        table["tenants"]["acme"]["namespaces"] = ["acme"]
        table["retry_seconds"] = 2.0
        self.config["handlers"] = {"globex": {"tenant": "globex"}}

    async def run_in(self, namespace: str, name: str, handler: str = "", **fields: Any) -> str:
        config = self.pod(name, **fields)
        config.metadata.namespace = namespace
        (self.log_directory / name).mkdir(exist_ok=True)
        request = cri.RunPodSandboxRequest(config=config, runtime_handler=handler)
        return str((await self.runtime.RunPodSandbox(request, timeout=60.0)).pod_sandbox_id)

    async def refusal(self, code: Code, call: Any) -> str:
        with self.assertRaises(GrpcError) as caught:
            await call
        self.assertEqual(caught.exception.code, code)
        return str(caught.exception)

    def projects(self) -> dict[str, int]:
        """Return how many servers each project has."""
        apis = {"": self.world.api, **{name: its.api for name, its in self.tenants.items()}}
        return {name: len(api.servers) for name, api in apis.items()}

    async def test_pods_are_in_their_tenants_projects_through_a_kill_and_a_revoked_credential(self) -> None:
        await self.start()
        own = await self.run_in("default", "own")
        acme = await self.run_in("acme", "web")
        globex = await self.run_in("default", "db", "globex")
        self.assertEqual(self.projects(), {"": 1, "acme": 1, "globex": 1})
        words = await self.refusal(Code.INVALID_ARGUMENT, self.run_in("acme", "stray", "globex"))
        self.assertIn("namespace acme is of tenant acme", words)
        asking = {"infranetes.io/tenant": "globex"}
        words = await self.refusal(Code.INVALID_ARGUMENT, self.run_in("default", "asks", annotations=asking))
        self.assertIn("allowed_tenants", words)
        containers = [
            await self.run_container(sandbox, self.box(script="sleep 1000"))
            for sandbox in (own, acme, globex)
        ]
        servers = self.world.running()
        await self.restart()
        for container in containers:
            await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual((self.world.running(), sum(self.projects().values())), (servers, 3))
        conditions = (await self.runtime.Status(cri.StatusRequest(), timeout=10.0)).status.conditions
        names = {each.type.removeprefix("InfranetesProvider/") for each in conditions if each.status}
        self.assertLessEqual({"openstack", "openstack/acme", "openstack/globex"}, names)

        self.world.revoke(self.tenants["acme"])
        words = await self.refusal(Code.FAILED_PRECONDITION, self.stop_pod(acme))
        self.assertIn("tenant acme", words)
        await self.refusal(Code.FAILED_PRECONDITION, self.run_in("acme", "more"))
        await self.remove_pod(own)
        await self.remove_pod(globex)
        self.assertEqual(self.projects(), {"": 0, "acme": 1, "globex": 0})
        await self.run_in("default", "another", "globex")
        self.world.projects[self.tenants["acme"].api.project] = self.tenants["acme"]  # valid again
        for sandbox in await self.sandboxes():
            await self.remove_pod(sandbox.id)
        await self.nothing_is_left()

    @slow(40, "a daemon is killed in nine launches")
    async def test_lives_of_three_owners_whose_daemons_are_killed_leave_nothing(self) -> None:
        self.world.token_seconds = 3.0  # tokens end in the middle, too
        owners = {"": ("default", ""), "acme": ("acme", ""), "globex": ("default", "globex")}
        await self.start()
        kept: dict[str, str] = {}
        for number in range(9):
            owner = tuple(owners)[number % 3]
            namespace, handler = owners[owner]
            begun = start(self.run_in(namespace, f"life-{number}", handler))
            begun.addErrback(lambda failure: failure.trap(GrpcError) and None)
            await self.sleep(0.1 * (number // 3))
            await self.restart()
            await begun
            self.world.revoke_tokens()  # as by a Keystone that is restarted
            sandbox = await self.run_in(namespace, f"life-{number}", handler)
            expected = {name: int(name in kept or name == owner) for name in owners}
            expected[owner] += owner in kept
            self.assertEqual(self.projects(), expected, number)
            if owner in kept:
                await self.remove_pod(kept.pop(owner))
            kept[owner] = sandbox
        for sandbox in kept.values():
            await self.remove_pod(sandbox)
        await self.nothing_is_left()

    async def test_a_tenant_that_is_no_longer_configured_keeps_its_pods_until_it_is_again(self) -> None:
        await self.start()
        sandbox = await self.run_in("acme", "web")
        await self.kill()
        tables = self.config["providers"]["openstack"]["tenants"]
        table = tables.pop("acme")
        self.unneeded = frozenset({*self.unneeded, "InfranetesProvider/openstack/acme"})
        await self.start()
        words = await self.refusal(Code.UNAVAILABLE, self.stop_pod(sandbox))
        self.assertIn("openstack/acme", words)
        self.assertEqual(self.projects()["acme"], 1)
        other = await self.run_in("acme", "other")
        self.assertEqual(self.projects()[""], 1, "no tenant lists the namespace any more")
        await self.kill()
        tables["acme"] = table
        await self.start()
        for id in (sandbox, other):
            await self.remove_pod(id)
        await self.nothing_is_left()
