# SPDX-License-Identifier: Apache-2.0
"""What is hidden of a configuration's file."""

from __future__ import annotations

import tomllib

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.ctl.secrets.configuration import Shown, without_secrets
from infranetes.providers import registry
from infranetes_common.config import secret
from infranetes_common.redaction import HIDDEN

TOML = """
provider = "aws"
[images]
auth_file = "/etc/infranetes/auth.json"
[handlers.secret-pods]
memory = "1GiB"
annotations.set = {"infranetes.io/size" = "m5.large", "example.org/password" = "planted-annotation"}
[[handlers.secret-pods.pool.sizes]]
count = 2
token = "planted-listed"
[providers.aws]
region = "eu-west-1"
access_key = "AKIAPLANTED"
secret_key = '''planted-secret
over two lines'''
# secret_key = "planted-in-a-comment"
[providers.other]
connection_string = "AccountName=me;AccountKey=planted"
sas = "sv=2022&planted"
pin = 1234
region = "planted-region"
url = "http://proxy"
uuid = "planted1-0123-0123"
login = {user = "me", password = "planted-inline", deep = [{x = "planted-deep"}]}
[unknown]
x = "planted-unknown"
"""


@attrs.frozen
class Settings:
    region: str = ""
    word: str = secret(default="")


class ConfigurationTests(SynchronousTestCase):
    def shown(self, text: str = TOML) -> Shown:
        return without_secrets(tomllib.loads(text))

    def test_values_that_may_be_secret_are_hidden_and_the_rest_is_shown(self) -> None:
        shown = self.shown()
        self.assertNotIn("planted", str(shown.table).lower())
        self.assertEqual(shown.table["images"], {"auth_file": "/etc/infranetes/auth.json"})
        self.assertEqual(shown.table["provider"], "aws")
        self.assertEqual(
            shown.table["handlers"],
            {
                "secret-pods": {
                    "memory": "1GiB",
                    "annotations": {
                        "set": {"infranetes.io/size": "m5.large", "example.org/password": HIDDEN}
                    },
                    "pool": {"sizes": [{"count": 2, "token": HIDDEN}]},
                }
            },
        )

    def test_of_a_plug_in_that_tells_no_class_all_values_are_hidden(self) -> None:
        providers = self.shown().table["providers"]
        assert isinstance(providers, dict)
        keys = ("connection_string", "sas", "pin", "region", "url", "uuid", "login")
        self.assertEqual(providers["other"], dict.fromkeys(keys, HIDDEN))
        self.assertEqual(
            providers["aws"], {"region": "eu-west-1", "access_key": HIDDEN, "secret_key": HIDDEN}
        )

    def test_a_plug_in_that_tells_its_class_says_what_is_secret(self) -> None:
        self.patch(registry, "_SETTINGS", {"other": f"{__name__}:Settings"})
        shown = self.shown('[providers.other]\nregion = "r"\nword = "planted"\n')
        self.assertEqual(shown.table, {"providers": {"other": {"region": "r", "word": HIDDEN}}})
        self.assertEqual(shown.secrets, ["planted"])

    def test_what_is_hidden_is_searched_for_unless_it_is_an_ordinary_word(self) -> None:
        expected = {
            *("planted-annotation", "planted-listed", "AKIAPLANTED", "planted-secret\nover two lines"),
            *("AccountName=me;AccountKey=planted", "sv=2022&planted", "1234", "planted-inline"),
            "planted1-0123-0123",
        }
        self.assertEqual(set(self.shown().secrets), expected)

    def test_values_of_the_wrong_type_and_none_at_all(self) -> None:
        for text in (
            "providers = 1\nhandlers = [1]\nimages = 'x'\n[pool]\nsizes = 5",
            "providers.aws = 'planted'",
        ):
            self.assertNotIn("planted", str(self.shown(text).table))
        self.assertEqual(self.shown("").table, {})
        self.assertEqual(
            self.shown('ca = ""\nproviders.x.y = ""').table, {"ca": "", "providers": {"x": {"y": ""}}}
        )

    def test_every_attribute_that_is_secret_is_hidden(self) -> None:
        for name in registry.names():
            cls = registry.settings_class(name)
            assert cls is not None
            secrets = [each.name for each in attrs.fields(attrs.resolve_types(cls)) if not each.repr]
            shown = without_secrets({"providers": {name: dict.fromkeys(secrets, "planted")}})
            self.assertNotIn("planted", str(shown.table))
        self.assertEqual([each.name for each in attrs.fields(Config) if not each.repr], [])
