# SPDX-License-Identifier: Apache-2.0
"""Tenants: their pods share a node and a provider, and none of the provider's credentials and networks.

To the daemon a tenant is a provider of its own, called PROVIDER/TENANT: with its own start, lists, sweeps,
limits of calls, volumes and troubles, which are no other tenant's. Records name it. This module says which
tenant a pod is of; `cloud.tenants` says what a cloud's tenant consists of. No I/O.

handler's tenant   namespace listed by   annotation        the pod is of
none               nobody                none              none, or refused with `require_tenant`
none               nobody                A                 A, if `allowed_tenants` has it
none               A                     none or A         A
A                  nobody, or A          none or A         A
A                  B                     any               refused: a listed namespace is one tenant's
none or A          any                   B                 refused, but for the second row

A tenant that lists namespaces has pods of no other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs

from infranetes.providers.annotation_rows import PREFIX
from infranetes_common.errors import InvalidArgument

SEPARATOR = "/"
ANNOTATION = "tenant"  # without the prefix
NAMESPACES = "namespaces"  # the key of a tenant's table that no cloud has
_OWN = ("tenants", "allowed_tenants", "require_tenant")  # keys that say who is which tenant


def node_provider_name(provider: str, tenant: str) -> str:
    """Return what a tenant is called as a provider. :param tenant: "": none."""
    return f"{provider}{SEPARATOR}{tenant}" if tenant else provider


def split(name: str) -> tuple[str, str]:
    """Return the provider and the tenant of what `node_provider_name` returned."""
    provider, _, tenant = name.partition(SEPARATOR)
    return provider, tenant


def tables(table: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    """Return the tables of tenants in a provider's table, which need not be checked yet."""
    listed = table.get("tenants")
    its = listed if isinstance(listed, Mapping) else {}
    return {str(name): each for name, each in its.items() if isinstance(each, Mapping)}


def names(value: object) -> tuple[str, ...]:
    """Return the names in a list of a table, whose form is checked elsewhere; none: it is no list."""
    return tuple(value) if isinstance(value, list | tuple) else ()


def merged(table: Mapping[str, object], tenant: str) -> dict[str, object]:
    """Return the provider's table as it is for a tenant: what the tenant's own table says goes first."""
    its = tables(table).get(tenant, {})
    common = {key: value for key, value in table.items() if key not in _OWN}
    return {**common, **{key: value for key, value in its.items() if key != NAMESPACES}}


def in_words_of(tenant: str, table: Mapping[str, object], provider: str, words: str) -> str:
    """Return a `ConfigError`'s words on a merged table with the tenant's own keys where they are."""
    for key in tables(table).get(tenant, {}):
        words = words.replace(f"providers.{provider}.{key}:", f"providers.{provider}.tenants.{tenant}.{key}:")
    return words


@attrs.frozen
class Tenant:
    """A tenant. :ivar namespaces: patterns with * and ?; empty: pods get here by their handler or an
    annotation only."""

    name: str
    namespaces: tuple[str, ...] = ()

    def lists(self, namespace: str) -> bool:
        """Return whether this is a namespace of the tenant's."""
        return any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)


@attrs.frozen
class Tenants:
    """The tenants of one provider. :ivar allowed: patterns of those that pods may name by annotation.

    :ivar required: whether pods of no tenant are refused."""

    provider: str
    all: tuple[Tenant, ...] = ()
    allowed: Sequence[str] = ()
    required: bool = False

    @classmethod
    def of(cls, provider: str, table: Mapping[str, object]) -> Tenants:
        """Return those of a provider's table, which the provider has checked."""
        tenants = tuple(Tenant(name, names(its.get(NAMESPACES))) for name, its in tables(table).items())
        allowed = names(table.get("allowed_tenants"))
        return cls(provider, tenants, allowed, bool(table.get("require_tenant", False)))

    def choose(self, namespace: str, by_handler: str, annotations: Mapping[str, str]) -> str:
        """Return the tenant of a pod; "": none. See the table above.

        :param by_handler: the tenant of the pod's handler; "": it has none.
        :raise InvalidArgument: it may not be of the tenant that it asks for; says by which key it could."""
        asked = annotations.get(PREFIX + ANNOTATION, "").strip()
        owner = self._owner(namespace)
        if asked and by_handler and asked != by_handler:
            raise _refusal(asked, f"the pod's RuntimeClass is for pods of tenant {by_handler}; leave it out")
        if asked and not by_handler and asked != owner and not self._allows(asked):
            raise _refusal(asked, f"allow it in {self._key('allowed_tenants')}, or leave it out")
        chosen = by_handler or asked or owner
        if chosen and owner and chosen != owner:
            raise InvalidArgument(
                f"namespace {namespace} is of tenant {owner} ({self._key(f'tenants.{owner}.{NAMESPACES}')}): "
                f"its pods can't be of tenant {chosen}; use a RuntimeClass without a tenant, or that tenant's"
            )
        if not chosen and self.required:
            raise InvalidArgument(
                f"namespace {namespace} is of no tenant, and {self._key('require_tenant')} refuses its "
                f"pods: have it listed by a tenant's {NAMESPACES}, or use a tenant's RuntimeClass"
            )
        if chosen:
            self._check(chosen, namespace)
        return chosen

    def _owner(self, namespace: str) -> str:
        """Return the tenant that lists a namespace: one that names it goes before one that has a pattern."""
        named = [each.name for each in self.all if namespace in each.namespaces]
        owners = named or [each.name for each in self.all if each.lists(namespace)]
        if len(owners) > 1:
            raise InvalidArgument(
                f"namespace {namespace} is listed by the tenants {' and '.join(owners)}: change "
                f"{self._key(f'tenants.{owners[0]}.{NAMESPACES}')}, since a namespace is one tenant's"
            )
        return next(iter(owners), "")

    def _allows(self, tenant: str) -> bool:
        return any(fnmatchcase(tenant, pattern) for pattern in self.allowed)

    def _check(self, name: str, namespace: str) -> None:
        tenant = next((each for each in self.all if each.name == name), None)
        if tenant is None:
            raise _refusal(name, f"provider {self.provider} has no such tenant; {self._known()}")
        if tenant.namespaces and not tenant.lists(namespace):
            raise InvalidArgument(
                f"tenant {name} has no pods of namespace {namespace}: have an administrator add it to "
                f"{self._key(f'tenants.{name}.{NAMESPACES}')}, or use another RuntimeClass"
            )

    def _known(self) -> str:
        return f"it has {', '.join(each.name for each in self.all)}" if self.all else "it has none at all"

    def _key(self, name: str) -> str:
        return f"providers.{self.provider}.{name}"


def all_tenants(providers: Mapping[str, Mapping[str, object]]) -> Iterator[Tenants]:
    """Yield the tenants of each provider that has a table. :param providers: the tables."""
    for name, table in providers.items():
        yield Tenants.of(name, table)


def _refusal(asked: str, words: str) -> InvalidArgument:
    return InvalidArgument(f"annotation {PREFIX}{ANNOTATION}: tenant {asked[:64]!r}: {words}")
