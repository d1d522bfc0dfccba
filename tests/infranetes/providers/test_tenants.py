# SPDX-License-Identifier: Apache-2.0
"""Which tenant a pod is of, by its namespace, its handler and its annotation; and a tenant's table."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import tenants
from infranetes.providers.tenants import Tenant, Tenants
from infranetes_common.errors import InvalidArgument

ACME = Tenant("acme", ("acme", "acme-*"))
GLOBEX = Tenant("globex")  # lists nothing: its pods have its handler
TWO = Tenants("openstack", (ACME, GLOBEX))


class ChoiceTests(SynchronousTestCase):
    def chosen(self, of: Tenants, namespace: str, handler: str = "", asked: str | None = None) -> str:
        annotations = {"infranetes.io/tenant": asked} if asked is not None else {}
        return of.choose(namespace, handler, annotations)

    def refused(self, of: Tenants, namespace: str, handler: str = "", asked: str | None = None) -> str:
        with self.assertRaises(InvalidArgument) as caught:
            self.chosen(of, namespace, handler, asked)
        return str(caught.exception)

    def test_a_namespace_that_a_tenant_lists_is_that_tenants(self) -> None:
        for namespace, tenant in (("acme", "acme"), ("acme-web", "acme"), ("acmes", ""), ("default", "")):
            self.assertEqual(self.chosen(TWO, namespace), tenant, namespace)
        self.assertEqual(self.chosen(TWO, "acme", asked="acme"), "acme", "what is so anyway may be said")

    def test_a_handler_has_a_tenant_whose_namespaces_its_pods_come_from(self) -> None:
        self.assertEqual(self.chosen(TWO, "acme-web", handler="acme"), "acme")
        self.assertEqual(self.chosen(TWO, "default", handler="globex"), "globex")
        self.assertIn("tenants.acme.namespaces", self.refused(TWO, "default", handler="acme"))

    def test_no_handler_and_no_annotation_leads_out_of_a_namespaces_tenant(self) -> None:
        free = Tenants("openstack", TWO.all, allowed=("*",))
        for handler, asked in (("globex", None), ("", "globex")):
            words = self.refused(free, "acme", handler, asked)
            self.assertIn("namespace acme is of tenant acme", words)
        for handler, asked in (("acme", "globex"), ("globex", "acme")):
            self.assertIn("RuntimeClass is for pods of tenant", self.refused(free, "acme", handler, asked))

    def test_an_annotation_counts_where_it_is_allowed(self) -> None:
        self.assertIn("providers.openstack.allowed_tenants", self.refused(TWO, "default", asked="globex"))
        allowing = Tenants("openstack", TWO.all, allowed=("glob*",))
        self.assertEqual(self.chosen(allowing, "default", asked="globex"), "globex")
        self.assertEqual(self.chosen(allowing, "default", handler="globex", asked="globex"), "globex")
        self.assertEqual(self.chosen(allowing, "default", asked=" globex\n"), "globex")
        self.assertEqual(
            self.chosen(TWO, "default", handler="globex", asked="globex"), "globex", "it is said"
        )
        words = self.refused(Tenants("openstack", TWO.all, allowed=("*",)), "default", asked="nobody")
        self.assertIn("no such tenant; it has acme, globex", words)
        nothing = Tenants("qemu", allowed=("*",))
        self.assertIn("none at all", self.refused(nothing, "default", asked="acme"))

    def test_pods_of_no_tenant_can_be_refused(self) -> None:
        strict = Tenants("openstack", TWO.all, required=True)
        self.assertIn("providers.openstack.require_tenant", self.refused(strict, "default"))
        self.assertEqual(self.chosen(strict, "acme"), "acme")
        self.assertEqual(self.chosen(strict, "default", handler="globex"), "globex")

    def test_a_name_goes_before_a_pattern_and_two_patterns_are_nobodys(self) -> None:
        both = Tenants("openstack", (Tenant("all", ("team-*",)), Tenant("one", ("team-one",))))
        self.assertEqual(self.chosen(both, "team-one"), "one")
        self.assertEqual(self.chosen(both, "team-two"), "all")
        twice = Tenants("openstack", (Tenant("all", ("team-*",)), Tenant("ends", ("*-one",))))
        self.assertIn("listed by the tenants all and ends", self.refused(twice, "team-one"))

    def test_without_tenants_all_is_as_before(self) -> None:
        self.assertEqual(self.chosen(Tenants("qemu"), "default"), "")


TABLE = {
    "cloud": "pods",
    "network": "pods",
    "max_sizes": 2,
    "allowed_tenants": ["*"],
    "require_tenant": True,
    "tenants": {"acme": {"namespaces": ["acme"], "cloud": "acme"}},
}


class TableTests(SynchronousTestCase):
    def test_a_tenants_table_is_its_own_over_the_providers(self) -> None:
        expected = {"cloud": "acme", "network": "pods", "max_sizes": 2}
        self.assertEqual(tenants.merged(TABLE, "acme"), expected)
        self.assertEqual(tenants.merged(TABLE, "gone"), {**expected, "cloud": "pods"})

    def test_what_is_read_of_it(self) -> None:
        found = Tenants.of("openstack", TABLE)
        expected = Tenants("openstack", (Tenant("acme", ("acme",)),), ("*",), required=True)
        self.assertEqual(found, expected)
        for wrong in ({"tenants": 7}, {"tenants": {"acme": 7}}, {}):
            self.assertEqual(Tenants.of("openstack", wrong).all, ())

    def test_errors_name_the_key_that_the_tenant_gave(self) -> None:
        words = "file: providers.openstack.cloud: wrong\nfile: providers.openstack.network: wrong"
        self.assertEqual(
            tenants.in_words_of("acme", TABLE, "openstack", words),
            "file: providers.openstack.tenants.acme.cloud: wrong\nfile: providers.openstack.network: wrong",
        )

    def test_names(self) -> None:
        for provider, tenant in (("openstack", "acme"), ("openstack", "")):
            self.assertEqual(tenants.split(tenants.node_provider_name(provider, tenant)), (provider, tenant))
