# SPDX-License-Identifier: Apache-2.0
"""What is reported of the configuration that a daemon uses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config, Reading, read
from infranetes.config.in_force import ConfigInForce, InForce
from infranetes.daemon.reload import in_force
from infranetes.providers import registry
from infranetes_common.config_text import defaults

AWS = """\
provider = "aws"
[providers.aws]
region = "eu-west-1"
image = "ami-12345678"
access_key = "AKIA"
secret_key = "hunter2"
"""
# Names of keys whose values are not secrets, although their names suggest it.
NO_SECRETS = {"key_name", "volume_key", "disk_key", "access_key"}


class InForceCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute()

    def read(self, text: str, **flags: str) -> Reading:
        self.file.write_text(text)
        return read(str(self.file), {key.replace("__", "."): value for key, value in flags.items()})

    def key(self, known: ConfigInForce, name: str) -> InForce:
        (found,) = (each for each in known.now.entries() if each.key == name)
        return found

    def reloaded(self, known: ConfigInForce, reading: Reading) -> None:
        known.take(reading, in_force(known.now.running, reading.config), 5.0)


class InForceTests(InForceCase):
    def test_where_values_are_from(self) -> None:
        drop_in = Path(f"{self.file}.d/a.toml")
        drop_in.parent.mkdir()
        drop_in.write_text("\ntimes.sweep = 5\n")
        known = ConfigInForce(self.read('cluster = "c"\n\n[log]\nlevel = "warn"\n', log__format="json"))
        for key, text, origin in (
            ("cluster", '"c"', f"{self.file}:1"),
            ("log.level", '"warn"', f"{self.file}:4"),
            ("times.sweep", "5.0", f"{drop_in}:2"),
            ("log.format", '"json"', "command line"),
            ("times.launch", "600.0", "default"),
            ("providers.qemu.bridge", '"infranetes0"', "default"),
        ):
            found = self.key(known, key)
            assert found.setting is not None
            self.assertEqual((found.setting.shown, str(found.origin)), (text, origin), key)
            self.assertEqual((found.reloaded, found.waiting), (False, None))

    def test_all_keys_are_there_once(self) -> None:
        keys = [each.key for each in ConfigInForce(self.read("")).now.entries()]
        expected = {each.key for each in defaults(Config)} - {"providers"}
        self.assertEqual({key for key in keys if not key.startswith("providers.")}, expected)
        self.assertEqual(len(keys), len(set(keys)))

    def test_after_a_reload_what_is_taken_is_in_force_and_the_rest_waits(self) -> None:
        known = ConfigInForce(self.read('log.level = "info"\ntimes.sweep = 5\n'))
        self.reloaded(known, self.read('#\nlog.level = "debug"\n#\ntimes.sweep = 6\ncluster = "c"\n'))
        level, sweep, cluster = (self.key(known, key) for key in ("log.level", "times.sweep", "cluster"))
        assert level.setting is not None and sweep.setting is not None
        self.assertEqual((level.setting.text, str(level.origin)), ('"debug"', f"{self.file}:2"))
        self.assertTrue(level.reloaded)
        self.assertIsNone(level.waiting)
        self.assertEqual((sweep.setting.text, str(sweep.origin)), ("5.0", f"{self.file}:2"))
        self.assertFalse(sweep.reloaded)
        assert sweep.waiting is not None and sweep.waiting.setting is not None
        self.assertEqual(sweep.waiting.setting.text, "6.0")
        self.assertEqual(str(sweep.waiting.origin), f"{self.file}:4")
        self.assertEqual(str(cluster.origin), "default")
        self.reloaded(known, self.read('times.sweep = 5\nlog.level = "info"\n'))
        self.assertEqual([each.key for each in known.now.entries() if each.reloaded or each.waiting], [])

    def test_a_key_that_only_a_restart_brings_or_takes_away(self) -> None:
        known = ConfigInForce(self.read("[handlers.a]\n"))
        self.reloaded(known, self.read("[handlers.b]\nmemory = 5\n"))
        gone, new = self.key(known, "handlers.a.memory"), self.key(known, "handlers.b.memory")
        self.assertIsNotNone(gone.setting)
        assert gone.waiting is not None and new.waiting is not None
        self.assertIsNone(gone.waiting.setting)
        self.assertIsNone(new.setting)
        self.assertFalse(new.reloaded)
        self.assertEqual(str(new.waiting.origin), f"{self.file}:2")

    def test_a_reload_that_failed_is_told_until_one_succeeds(self) -> None:
        known = ConfigInForce(self.read(""))
        known.refuse("wrong")
        self.assertEqual((known.now.trouble, known.now.read_at), ("wrong", 0.0))
        self.reloaded(known, self.read(""))
        self.assertEqual((known.now.trouble, known.now.read_at), ("", 5.0))


class SecretTests(InForceCase):
    def test_values_that_are_secret_are_not_shown(self) -> None:
        known = ConfigInForce(self.read(AWS))
        self.reloaded(known, self.read(AWS.replace("hunter2", "hunter3")))
        secret = self.key(known, "providers.aws.secret_key")
        assert secret.setting is not None and secret.waiting is not None
        self.assertTrue(secret.setting.secret)
        self.assertEqual(secret.setting.shown, "")
        shown = json.dumps(known.now.shown())
        self.assertIn('"providers.aws.secret_key": "(secret)"', shown)
        self.assertNotIn("hunter", shown + repr([*known.now.entries()]))

    def test_a_plug_in_that_does_not_say_its_keys_has_nothing_but_secrets(self) -> None:
        known = ConfigInForce(self.read('provider = "other"\nproviders.other = { user = "u", pin = 1234 }\n'))
        self.assertEqual(
            {key: value for key, value in known.now.shown().items() if key.startswith("providers.")},
            {"providers.other.user": "(secret)", "providers.other.pin": "(secret)"},
        )

    def test_every_key_that_sounds_like_a_secret_is_one_or_names_a_file(self) -> None:
        seen = set()
        classes: list[type[attrs.AttrsInstance]] = [Config]
        classes += [cls for name in registry.names() if (cls := registry.settings_class(name)) is not None]
        for cls in classes:
            for each in defaults(cls):
                name = each.key.rpartition(".")[2]
                if not re.search("secret|password|passphrase|token|credential|key$|^key", name):
                    continue
                seen.add(name)
                harmless = name in NO_SECRETS or name.endswith(("_file", "_endpoint"))
                self.assertEqual(each.secret, not harmless, f"{cls.__module__}: {each.key}")
        self.assertLessEqual({"secret_key", "password_file", "secret_file"}, seen)
