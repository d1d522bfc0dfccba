# SPDX-License-Identifier: Apache-2.0
"""What a test needs from the machine that runs it, and the tier that it therefore belongs to.

A decorator on a test method or a class says it::

    @needs_root
    @needs_programs("skopeo", "mkfs.erofs")
    class PullTests(TestCase): ...

`NEEDS` in a package's ``__init__`` says it for all that is in the package. Subclasses inherit what their
bases need. Where the machine lacks something, the test is skipped, by trial alone too; with ``CI`` in the
environment it is not, so that it fails.

A tier is a set of tests with a `make` target, and holds all the smaller ones. A test is in the smallest tier
that gives all that it needs.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import shutil
import sys
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import attrs

from tests.guests import catalogue

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "build" / "tools"
GUEST_IMAGES = Path("/var/lib/infranetes/guest")
IMAGES_VARIABLE = "INFRANETES_TEST_IMAGES"
NIGHTLY_VARIABLE = "INFRANETES_TEST_NIGHTLY"
CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SYS_NICE = 12, 21, 23  # capabilities(7)


class Tier(enum.IntEnum):
    """Which `make` target runs a test first."""

    CHECK = 1
    TEST = 2
    ALL = 3
    NIGHTLY = 4

    @property
    def command(self) -> str:
        """The command that runs this tier."""
        return {1: "make check", 2: "make test", 3: "make test-all", 4: "make test-nightly"}[self]


@attrs.frozen
class Need:
    """Something that a test needs.

    :ivar name: what it is, as a phrase: "root", "the program skopeo".
    :ivar remedy: what gives it to the tests, as an imperative.
    :ivar tier: the smallest tier that gives it.
    """

    name: str
    remedy: str = attrs.field(eq=False)
    tier: Tier = attrs.field(eq=False)
    _is_there: Callable[[], bool] = attrs.field(eq=False, repr=False)

    @property
    def asks_for_root(self) -> bool:
        """Whether only root has it."""
        return self in (ROOT_USER, NETWORK, MOUNTS, REALTIME, VMS)

    @property
    def is_met(self) -> bool:
        """Whether this process has it."""
        return _met(self)

    def __str__(self) -> str:
        return f"needs {self.name}: {self.remedy}"


@functools.cache
def _met(need: Need) -> bool:
    return need._is_there()


# Debian's package of each program, where its name differs from the program's.
PACKAGES = {
    "conntrack": "conntrack",
    "dhclient": "isc-dhcp-client",
    "dhcpcd": "dhcpcd-base",
    "dockerd": "docker.io",
    "docker": "docker.io (Debian 13: docker-cli)",
    "dnsmasq": "dnsmasq-base",
    "dpkg-buildpackage": "dpkg-dev",
    "fdisk": "fdisk",
    "fsck.erofs": "erofs-utils",
    "gcc": "gcc libc6-dev",
    "go": "golang-go",
    "ip": "iproute2",
    "journalctl": "systemd",
    "mcopy": "mtools",
    "mkfs.erofs": "erofs-utils",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.vfat": "dosfstools",
    "mkfs.xfs": "xfsprogs",
    "mmd": "mtools",
    "nbdfuse": "libnbd-bin",
    "nft": "nftables",
    "protoc": "protobuf-compiler",
    "ps": "procps",
    "qemu-ga": "qemu-guest-agent",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "swtpm": "swtpm",
    "sfdisk": "fdisk",
    "sshd": "openssh-server",
    "systemd-analyze": "systemd",
}


def find_program(name: str) -> str | None:
    """Return the path of a program, also of one that is only on root's PATH; None: it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def capable(*capabilities: int) -> bool:
    """Return whether this process has these capabilities, by their numbers."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return all(effective >> each & 1 for each in capabilities)
    return False


def program(name: str) -> Need:
    """Return the need for a program that Debian packages."""
    package = PACKAGES.get(name, name)
    return Need(
        f"the program {name}", f"apt-get install {package}", Tier.TEST, lambda: find_program(name) is not None
    )


def tool(name: str, tier: Tier = Tier.TEST, target: str = "tools") -> Need:
    """Return the need for somebody else's program that a `make` target builds."""
    return Need(f"{name} in build/tools", f"make {target}", tier, lambda: (TOOLS / name).exists())


def guest(name: str) -> Need:
    """Return the need for a guest that `tests.guests` makes, by its file's name."""
    large = catalogue.FAMILIES[catalogue.family_of(name)].large
    target = "test-guests-large" if large else "test-guests"
    tier = Tier.NIGHTLY if large else Tier.TEST
    return Need(f"the guest {name}", f"make {target}", tier, lambda: catalogue.path(name).exists())


def _guest_image() -> bool:
    return any(Path(os.environ.get(IMAGES_VARIABLE) or GUEST_IMAGES).glob("*"))


ROOT_USER = Need(
    "root", "run as root, or as a user whom sudo asks nothing", Tier.TEST, lambda: os.geteuid() == 0
)
NETWORK = Need(
    "NET_ADMIN and SYS_ADMIN",
    "run as root, or docker run --cap-add NET_ADMIN --cap-add SYS_ADMIN",
    Tier.TEST,
    lambda: os.geteuid() == 0 and capable(CAP_NET_ADMIN, CAP_SYS_ADMIN),
)
MOUNTS = Need(
    "SYS_ADMIN",
    "run as root, or docker run --cap-add SYS_ADMIN",
    Tier.TEST,
    lambda: os.geteuid() == 0 and capable(CAP_SYS_ADMIN),
)
REALTIME = Need(
    "SYS_NICE",
    "run as root, or docker run --cap-add SYS_NICE",
    Tier.TEST,
    lambda: os.geteuid() == 0 and capable(CAP_SYS_NICE),
)
VMS = Need("real VMs", "make image, and run as root", Tier.ALL, lambda: NETWORK.is_met and _guest_image())
KUBERNETES = tool("kubernetes", Tier.NIGHTLY, "cluster-tools")
NIGHT = Need("hours", "make test-nightly", Tier.NIGHTLY, lambda: True)


class _Needy(Protocol):
    """A test method or a class of tests."""

    __name__: str


T = TypeVar("T", bound=_Needy)
U = TypeVar("U")


def needs(*which: Need) -> Callable[[T], T]:
    """Return a decorator that says what a test or a class of tests needs."""

    def decorate(thing: T) -> T:
        setattr(thing, "declared_needs", (*getattr(thing, "declared_needs", ()), *which))  # noqa: B010 - a function or a class
        unmet = [each for each in which if not each.is_met]
        if unmet and "CI" not in os.environ:
            attribute = "__unittest_skip_why__" if isinstance(thing, type) else "skip"
            setattr(thing, attribute, str(unmet[0]))
            if isinstance(thing, type):
                setattr(thing, "__unittest_skip__", True)  # noqa: B010 - also keeps setUpClass from running
        return thing

    return decorate


def needs_programs(*names: str) -> Callable[[T], T]:
    """Return a decorator of tests that run these programs of Debian's."""
    return needs(*map(program, names))


def needs_tools(*names: str) -> Callable[[T], T]:
    """Return a decorator of tests that run these programs, which `make tools` builds."""
    return needs(*map(tool, names))


def needs_guests(*names: str) -> Callable[[T], T]:
    """Return a decorator of tests that boot these guests of `tests.guests`, such as `tiny.qcow2`."""
    return needs(*map(guest, names))


needs_root = needs(ROOT_USER)
needs_netns = needs(NETWORK, program("ip"), program("nft"))
needs_mounts = needs(MOUNTS)
needs_realtime = needs(REALTIME)
needs_vms = needs(VMS)
needs_docker = needs(MOUNTS, program("dockerd"), program("docker"))
needs_crun = needs(MOUNTS, program("crun"), program("conmon"))
needs_systemd = needs(MOUNTS, program("systemd-analyze"), program("journalctl"))
needs_registry = needs_programs("docker-registry", "skopeo")
needs_qemu = needs(program("qemu-system-x86_64"), program("qemu-img"))
nightly = needs(NIGHT)


def in_tier(tier: Tier) -> Callable[[T], T]:
    """Return a decorator that puts a test into another tier than its needs do."""

    def decorate(thing: T) -> T:
        setattr(thing, "declared_tier", tier)  # noqa: B010 - a function or a class
        return thing

    return decorate


def _parents(module: str) -> Iterable[str]:
    """Yield the names of a module and of the packages that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


@functools.cache
def _needs_of_module(module: str) -> tuple[Need, ...]:
    found: list[Need] = []
    for name in _parents(module):
        found += getattr(sys.modules.get(name) or importlib.import_module(name), "NEEDS", ())
    return tuple(found)


def needs_of(test: unittest.TestCase) -> tuple[Need, ...]:
    """Return what a test needs, without repetition."""
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    module = type(test).__module__
    own = (*getattr(test, "declared_needs", ()), *getattr(method, "declared_needs", ()))
    return tuple(dict.fromkeys((*own, *(_needs_of_module(module) if module.startswith("tests") else ()))))


def tier_of(test: unittest.TestCase) -> Tier:
    """Return the smallest tier that a test is in.

    One that `in_tier` decorates is in that.
    """
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    stated: Tier | None = getattr(method, "declared_tier", None) or getattr(test, "declared_tier", None)
    return stated or max((each.tier for each in needs_of(test)), default=Tier.CHECK)


def repetitions(usual: U, nightly: U) -> U:
    """Return how often, or with what, a test repeats something: `usual`, or at night `nightly`."""
    return nightly if os.environ.get(NIGHTLY_VARIABLE) else usual
