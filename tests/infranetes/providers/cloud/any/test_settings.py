# SPDX-License-Identifier: Apache-2.0
"""The configuration of the provider of any driver, and the drivers of the installed libcloud."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import libcloud
from libcloud.compute.base import NodeDriver
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.any import dialects
from infranetes.providers.cloud.any.dialects import DIALECTS
from infranetes.providers.cloud.any.settings import Settings
from infranetes_common.config import structure
from infranetes_common.config_outside import Verdict, looked_at
from infranetes_common.errors import ConfigError


def settings(**table: Any) -> Settings:
    given = {
        "driver": "digitalocean",
        "credentials_file": "/etc/infranetes/credentials.toml",
        "image": "i",
        "locations": ["l"],
        **table,
    }
    return structure(given, Settings, source="a.toml", prefix="providers.libcloud")


class SettingsTests(SynchronousTestCase):
    def refused(self, key: str, *words: str, **table: Any) -> None:
        said = str(self.assertRaises(ConfigError, settings, **table))
        self.assertEqual(said.count("\n"), 0, said)
        self.assertIn(f"a.toml: providers.libcloud.{key}: ", said)
        for each in words:
            self.assertIn(each, said)

    def test_a_driver_that_libcloud_does_not_have(self) -> None:
        self.refused("driver", "did you mean digitalocean?", driver="DigitalOceans")
        self.refused("driver", "known are", "linode", driver="x")
        self.refused("driver", "nowhere", driver="nowhere.at.all:Driver")
        self.refused("driver", "can't be imported", driver="libcloud.compute.drivers.ovh:Nothing")
        self.refused("driver", "NodeDriver", driver="collections:OrderedDict")

    def test_a_driver_that_tells_no_sizes(self) -> None:
        self.refused("driver", "tells no sizes", driver="outscale", user_data="ex_user_data", locations=[])

    def test_a_driver_that_can_not_make_vms(self) -> None:
        self.assertIn(
            "libvirt can't make VMs", str(self.assertRaises(ConfigError, settings, driver="libvirt"))
        )

    def test_a_driver_without_user_data(self) -> None:
        for driver in ("ovh", "upcloud", "kamatera"):
            self.refused("user_data", "takes user-data", driver=driver)

    def test_arguments_that_the_driver_does_not_have(self) -> None:
        self.refused(
            "arguments",
            "there is no argument projekt; there are key, project",
            driver="equinixmetal",
            user_data="cloud_init",
            arguments={"projekt": "p"},
        )
        self.refused("create", "there is no argument ex_tags", "ex_user_data", create={"ex_tags": ["a"]})
        self.refused("user_data", "there is no argument userdata", user_data="userdata")

    def test_what_the_daemon_gives_is_not_given_twice(self) -> None:
        for name in ("name", "size", "image", "location"):
            self.refused("create", f"{name} is given by the daemon", create={name: "x"})

    def test_an_argument_that_create_node_needs_besides(self) -> None:
        user_data = "ex_create_attr.userdata"
        words = "needs ex_network, ex_description"
        self.refused("create", words, driver="gig_g8", user_data=user_data, locations=[])
        more = {"ex_network": "n", "ex_description": "d"}
        settings(driver="gig_g8", user_data=user_data, locations=[], create=more)

    def test_a_location_where_one_is_needed_and_none_where_there_are_none(self) -> None:
        self.refused("locations", "one has to be given", locations=[])
        self.refused("locations", "leave it out", driver="cloudscale")
        self.refused(
            "locations",
            "leave it out",
            driver="libcloud.compute.drivers.dummy:DummyNodeDriver",
            user_data="image",
        )

    def test_an_image_where_one_is_needed(self) -> None:
        self.refused("image", "has to be given", image="")
        settings(driver="vultr", image="", create={"ex_snapshot": "s"})

    def test_what_is_known_of_a_driver_can_be_replaced(self) -> None:
        its = settings().dialect
        self.assertEqual((its.user_data, its.address), ("ex_user_data", "private"))
        its = settings(driver="vultr", pod_address="private", create={"ex_backups": True}).dialect
        self.assertEqual((its.address, its.create), ("private", {"ex_backups": True}))
        self.assertEqual(
            settings(user_data="ex_create_attr.user_data").dialect.user_data, "ex_create_attr.user_data"
        )

    def test_a_driver_that_this_libcloud_has_not_yet(self) -> None:
        newer = attrs.evolve(DIALECTS["vultr"], concrete="VultrNodeDriverV9")
        self.patch(dialects, "DIALECTS", {"vultr": newer})
        self.refused("driver", "newer libcloud", "VultrNodeDriverV9", driver="vultr")

    def test_the_file_of_credentials_is_looked_at(self) -> None:
        path = Path(self.mktemp()).absolute()
        path.write_text('key = "k"')
        path.chmod(0o644)
        its = settings(credentials_file=str(path))
        found = [each for each in looked_at(its, {"credentials_file"}) if each.verdict is Verdict.WRONG]
        self.assertEqual([each.key for each in found], ["credentials_file"])
        self.assertEqual(found[0].words, f"{path} may be read by others (mode 0644): chmod 600 it")
        path.chmod(0o600)
        found = [each for each in looked_at(its, {"credentials_file"}) if each.verdict is Verdict.WRONG]
        self.assertEqual(found, [])


VERSION = tuple(map(int, re.findall(r"[0-9]+", libcloud.__version__)[:2]))
SINCE = {"linode": (3, 9)}  # the libcloud that brought what a dialect needs
KNOWN = {name: its for name, its in DIALECTS.items() if SINCE.get(name, (0,)) <= VERSION}


class DialectTests(SynchronousTestCase):
    """The table says what the drivers of the installed libcloud take. A libcloud that takes something else
    fails here."""

    @classmethod
    def setUpClass(cls) -> None:
        """Import the drivers, which takes a moment."""
        for name in DIALECTS:
            dialects.find(name)

    def arguments(self, name: str) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(dialects.concrete(name).create_node).parameters)

    def test_create_node_takes_what_it_is_given(self) -> None:
        for name, its in KNOWN.items():
            known = self.arguments(name)
            given = [*its.create, its.user_data.partition(".")[0], its.password]
            for argument in filter(None, given):
                self.assertIn(argument, known, name)

    def test_create_node_needs_nothing_that_it_is_not_given(self) -> None:
        for name, its in KNOWN.items():
            given = ("name", "size", "image", "location", *its.create, its.password)
            self.assertEqual(dialects.missing(dialects.concrete(name).create_node, given), [], name)

    def test_lists_take_what_they_are_given(self) -> None:
        for name, its in KNOWN.items():
            driver = dialects.concrete(name)
            for argument in its.listing:
                self.assertTrue(dialects.takes(driver.list_nodes, argument), name)
            for method in (driver.list_nodes, driver.list_sizes):
                needed = set(dialects.missing(method, its.listing)) - {"location"}
                self.assertEqual(needed, set(), name)

    def test_drivers_without_user_data_have_none_still(self) -> None:
        """One that gets it is a driver that can be offered."""
        for name, its in KNOWN.items():
            if not its.user_data:
                found = [each for each in self.arguments(name) if "data" in each or "cloud" in each]
                self.assertEqual(found, [], name)

    def test_concrete_classes_are_those_of_the_objects(self) -> None:
        for name, its in KNOWN.items():
            if its.concrete:
                made = dialects.find(name)(key="k")
                self.assertIs(type(made), dialects.concrete(name), name)

    def test_only_libvirt_can_not_make_vms(self) -> None:
        base = [name for name in KNOWN if dialects.concrete(name).create_node is NodeDriver.create_node]
        self.assertEqual(base, ["libvirt"])
