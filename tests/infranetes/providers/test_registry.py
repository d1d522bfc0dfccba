# SPDX-License-Identifier: Apache-2.0
"""Providers are found by name: built-in ones first, then plug-ins, each imported only when it is needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from infranetes.providers import libraries, registry
from infranetes.providers.interface import IPodProvider, ProviderContext
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor

CONTEXT = ProviderContext(Path("/nonexistent/state"), Path("/nonexistent/run"), "cluster", "node")


@implementer(IPodProvider)
class Whole:
    """A provider with every method, which does nothing."""

    name = "whole"

    def __init__(self, *made_with: Any) -> None:
        self.made_with = made_with

    def start(self, progress: Any) -> Deferred[None]:
        return succeed(None)

    def stop(self) -> Deferred[None]:
        return succeed(None)

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        return succeed(None)

    def launch(self, spec: Any) -> Deferred[Any]:
        raise NotImplementedError

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Any]:
        raise NotImplementedError

    def get(self, instance_id: str) -> Deferred[Any]:
        raise NotImplementedError

    def list(self) -> Any:
        return succeed([])

    def destroy(self, instance_id: str) -> Deferred[None]:
        return succeed(None)

    def watch(self, ended: Any) -> None:
        pass

    def status(self) -> dict[str, str]:
        return {}


def misconfigured(reactor: Any, table: Any, context: Any) -> Any:
    raise ConfigError("infranetes.toml: provider.x.y: not a number")


def broken(reactor: Any, table: Any, context: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def partial(reactor: Any, table: Any, context: Any) -> Any:
    return object()


class RegistryTests(SynchronousTestCase):
    def setUp(self) -> None:
        """Plug-ins are found on the module path: here, a directory with one distribution."""
        site = Path(self.mktemp())
        meta = site / "a_cloud-1.0.dist-info"
        meta.mkdir(parents=True)
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: a-cloud\nVersion: 1.0\n")
        self.entry_points = meta / "entry_points.txt"
        self.plug_in("whole = tests.infranetes.providers.test_registry:Whole")
        self.patch(sys, "path", [str(site), *sys.path])

    def plug_in(self, *lines: str) -> None:
        self.entry_points.write_text("\n".join(["[infranetes.providers]", *lines, ""]))

    def create(self, name: str, table: Any = None) -> Any:
        return registry.create(cast(IReactor, Clock()), name, table or {}, CONTEXT)

    def refused(self, name: str) -> str:
        return str(self.assertRaises(ConfigError, self.create, name))

    def test_built_in_and_plugged_in_names_are_known(self) -> None:
        names = registry.names()
        self.assertEqual(names, sorted(names))
        self.assertLessEqual({"aws", "qemu", "simulated", "whole"}, set(names))

    def test_a_plug_in_is_made_with_reactor_table_and_context(self) -> None:
        clock = cast(IReactor, Clock())
        provider: Any = registry.create(clock, "whole", {"a": 1}, CONTEXT)
        self.assertIsInstance(provider, Whole)
        self.assertEqual(provider.made_with, (clock, {"a": 1}, CONTEXT))

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        self.assertIn("'qemo'; did you mean qemu?", self.refused("qemo"))
        message = self.refused("nobody")
        for name in ("qemu", "simulated", "vsphere", "whole"):
            self.assertIn(name, message)

    def test_one_of_this_projects_own_says_which_package_it_is_in(self) -> None:
        self.patch(registry, "entry_points", lambda group: ())
        error = self.assertRaises(ConfigError, registry.create, Clock(), "simulated", {}, CONTEXT)
        self.assertIn("install", str(error))
        self.assertIn("infranetes-simulation", str(error))

    def test_a_plug_in_can_not_take_a_built_in_name(self) -> None:
        self.plug_in("qemu = tests.infranetes.providers.test_registry:Whole")
        self.assertNotIsInstance(self.create("qemu"), Whole)

    def test_two_plug_ins_of_one_name_are_refused_with_both(self) -> None:
        second = Path(sys.path[0]) / "b_cloud-1.0.dist-info"
        second.mkdir()
        (second / "METADATA").write_text("Metadata-Version: 2.1\nName: b-cloud\nVersion: 1.0\n")
        (second / "entry_points.txt").write_text("[infranetes.providers]\nwhole = b_cloud:create\n")
        message = self.refused("whole")
        self.assertIn("b_cloud:create", message)
        self.assertIn("test_registry:Whole", message)

    def test_a_plug_in_that_can_not_be_imported_is_named_with_the_reason(self) -> None:
        self.plug_in("whole = no_such_module:create")
        message = self.refused("whole")
        self.assertIn("no_such_module:create", message)
        self.assertIn("ModuleNotFoundError", message)
        self.assertEqual(len(self.flushLoggedErrors(ModuleNotFoundError)), 1)

    def test_what_is_no_provider_is_refused(self) -> None:
        self.plug_in("whole = tests.infranetes.providers.test_registry:partial")
        self.assertIn("not an IPodProvider", self.refused("whole"))

    def test_a_providers_own_config_error_passes_as_it_is(self) -> None:
        self.plug_in("whole = tests.infranetes.providers.test_registry:misconfigured")
        self.assertEqual(self.refused("whole"), "infranetes.toml: provider.x.y: not a number")

    def test_a_factory_that_breaks_is_named_and_logged(self) -> None:
        self.plug_in("whole = tests.infranetes.providers.test_registry:broken")
        self.assertIn("'whole' can't be made: ZeroDivisionError", self.refused("whole"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_no_provider_is_imported_before_it_is_asked_for(self) -> None:
        program = """
            import sys
            from infranetes.providers import libraries, registry
            registry.names()
            print(sorted(m for m in sys.modules if m.startswith("infranetes.providers.")))
        """
        said = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(registry.__file__).parents[2],
        ).stdout
        modules = ("annotation_rows", "interface", "libraries", "registry", "tenants")
        self.assertEqual(said.strip(), str([f"infranetes.providers.{each}" for each in modules]))

    def test_the_keys_of_one_whose_package_is_not_installed_are_not_known(self) -> None:
        """Debian's entry points name the simulation, which is another package; nothing is logged of that."""
        point = EntryPoint("absent", "no_such_package_here:Settings", registry.SETTINGS_GROUP)
        self.patch(registry, "entry_points", lambda group: [point])
        self.assertIsNone(registry.settings_class("absent"))

    def test_one_whose_libraries_are_missing_says_what_to_install(self) -> None:
        """Each in a process in which none of them can be imported; its keys are known all the same."""
        program = """
            import sys
            from twisted.internet.task import Clock
            from infranetes.providers import libraries, registry
            from infranetes_common.errors import ConfigError

            class Missing:
                def find_spec(self, name, path=None, target=None):
                    if any(name.partition(".")[0] in each.modules for each in libraries.CLOUDS.values()):
                        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

            sys.meta_path.insert(0, Missing())
            context = registry.ProviderContext(None, None, "cluster", "node", source="file.toml")
            for name in libraries.CLOUDS:
                assert registry.settings_class(name) is not None, name
                try:
                    registry.create(Clock(), name, {}, context)
                except ConfigError as error:
                    print(error)
        """
        said = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(registry.__file__).parents[2],
        ).stdout.splitlines()
        clouds = [name for name in registry._BUILT_IN if name != "qemu"]
        self.assertEqual(set(clouds), set(libraries.CLOUDS))
        for name, line in zip(libraries.CLOUDS, said, strict=True):
            self.assertIn(f"file.toml: provider: {name!r}", line)
            self.assertIn(f"pip install 'infranetes[{name}]'", line)
            self.assertIn("apt-get install python3-libcloud", line)
