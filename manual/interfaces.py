# SPDX-License-Identifier: Apache-2.0
"""The reference of the interfaces that a provider implements, from their docstrings."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from zope.interface import Attribute
from zope.interface.interface import InterfaceClass, Method

from infranetes_common import errors

PAGE = "interfaces.md"
_MOST = 1200  # words of a page
# What somebody who brings a provider, or a kind of containers, meets.
MODULES: Sequence[tuple[str, str]] = (
    ("infranetes.providers.interface", "Providers of VMs"),
    ("infranetes.providers.size_choices", "Sizes"),
    ("infranetes.providers.volumes", "Volumes and snapshots"),
    ("infranetes.providers.hypervisor", "Hypervisors and consoles"),
    ("infranetes.images.interface", "Catalogues of VM images"),
    ("vmserver.containers.interface", "Kinds of containers, in the VM"),
)
_HEAD = """\
# Interfaces

What a provider implements: each call with its contract, from the code. `IPodProvider` and
`IContainerProvider` are what each has to have; of the others it provides what it can do. [Writing a
provider](writing-a-provider.md) has a whole one, and tells of the suites that hold all to these words.
"""


def pages() -> Mapping[str, str]:
    """Return the pages by their files' names, the first of which leads to the others."""
    found, titles = {}, []
    for name, title in MODULES:
        for number, group in enumerate(_groups(interfaces(name))):
            titles.append(f"{title}, continued" if number else title)
            found[_name(titles[-1])] = _module(name, titles[-1], group)
    titles.append("Errors")
    found[_name("Errors")] = _errors()
    listed = "\n".join(f"- [{title}]({_name(title)})" for title in titles)
    toctree = "\n".join(_name(title).removesuffix(".md") for title in titles)
    return {PAGE: f"{_HEAD}\n{listed}\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n", **found}


def _name(title: str) -> str:
    words = "".join(each if each.isalnum() else "-" for each in title.lower().replace(",", ""))
    return f"interfaces-{words}.md"


def interfaces(module: str) -> list[InterfaceClass]:
    """Return the interfaces that a module defines, in its order."""
    found = vars(importlib.import_module(module)).values()
    return [each for each in found if isinstance(each, InterfaceClass) and each.__module__ == module]


def _groups(found: Sequence[InterfaceClass]) -> Sequence[Sequence[InterfaceClass]]:
    """Return interfaces in their order, in groups that are read in some minutes each."""
    groups: list[list[InterfaceClass]] = [[]]
    for each in found:
        if sum(len(_interface(one).split()) for one in (*groups[-1], each)) > _MOST and groups[-1]:
            groups.append([])
        groups[-1].append(each)
    return groups


def _module(name: str, title: str, found: Sequence[InterfaceClass]) -> str:
    body = "\n".join(_interface(each) for each in found)
    return f"# {title}\n\n````{{eval-rst}}\n.. py:currentmodule:: {name}\n\n{body}\n````\n"


def _errors() -> str:
    """Return the errors that the calls raise: each is a status of gRPC's."""
    found = [
        each
        for each in vars(errors).values()
        if inspect.isclass(each)
        and issubclass(each, errors.InfranetesError)
        and each.__module__ == errors.__name__
    ]
    told = "\n".join(
        f".. py:exception:: {each.__name__}\n\n{_indented(_literals(inspect.getdoc(each) or ''))}\n"
        for each in found
    )
    return f"# Errors\n\n````{{eval-rst}}\n.. py:currentmodule:: {errors.__name__}\n\n{told}\n````\n"


def _interface(each: InterfaceClass) -> str:
    bases = [base.__name__ for base in each.__bases__ if base.__name__ != "Interface"]
    extends = f"Extends {', '.join(f':py:class:`{base}`' for base in bases)}.\n\n" if bases else ""
    inner = "\n".join(_members(each))
    return f".. py:class:: {each.__name__}\n\n{_indented(extends + _docs(each))}\n\n{_indented(inner)}\n"


def _members(each: InterfaceClass) -> Iterator[str]:
    for name in each.names():
        member = each[name]
        if isinstance(member, Method):
            yield f".. py:method:: {name}{member.getSignatureString()}\n\n{_indented(_docs(member))}\n"
        elif isinstance(member, Attribute):
            yield f".. py:attribute:: {name}\n\n{_indented(_docs(member))}\n"


def _docs(of: InterfaceClass | Attribute) -> str:
    """Return a docstring; the code's `names` are literals on the site."""
    return _literals(inspect.cleandoc(of.__doc__ or ""))


def _literals(words: str) -> str:
    return words.replace("``", "`").replace("`", "``")


def _indented(text: str) -> str:
    return textwrap.indent(text, "   ")
