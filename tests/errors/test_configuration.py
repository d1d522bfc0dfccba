# SPDX-License-Identifier: Apache-2.0
"""Mistakes in infranetes.toml, as `infranetes-ctl config check` and the daemon's start tell them."""

from __future__ import annotations

from tests.errors.mistakes import CTL, Mistake, MistakeCase


class ConfigurationTests(MistakeCase):
    def checked(self, content: str, cause: str, way_out: str) -> None:
        """Check that a file with this content is refused, with file and line."""
        path = self.file(content)
        said = {
            CTL: self.typed("config", "check", "--elsewhere", path, code=2),
            "another command": self.typed("pods", "--config", path, code=2),
        }
        self.told(Mistake(cause, way_out), said)
        self.assertRegex(said[CTL], rf"{path}:[0-9]+: ")

    def test_1_a_key_is_misspelt(self) -> None:
        self.checked("run_dri = '/run/x'\n", "run_dri: not known", "did you mean run_dir")

    def test_2_a_value_is_of_another_type(self) -> None:
        self.checked("parallel_agents = 'many'\n", "parallel_agents", "expected|has to be|is needed|number")

    def test_3_a_quote_is_missing(self) -> None:
        self.checked("node = 'a\n", "TOML", "quot|'")

    def test_4_a_page_for_everybody(self) -> None:
        self.checked("[metrics]\nlisten = '0.0.0.0:9475'\npage = true\n", "the page shows the names of pods",
                     r"metrics\.token_file")  # fmt: skip

    def test_5_a_certificate_without_its_key(self) -> None:
        self.checked(
            "[metrics]\nlisten = '127.0.0.1:9475'\ncertificate_file = '/c'\n",
            r"metrics\.certificate_file",
            r"metrics\.key_file have to be given together",
        )

    def test_6_policies_without_an_api_server(self) -> None:
        self.checked("[kubernetes]\nnetwork_policies = true\n", r"kubernetes\.network_policies",
                     r"set kubernetes\.kubeconfig")  # fmt: skip

    def test_7_a_socket_that_is_no_path(self) -> None:
        self.checked("socket = 'infranetes.sock'\n", "is not an absolute path", "unix:///PATH")

    def test_8_the_socket_is_called_as_cri_os(self) -> None:
        self.checked("socket = '/run/crio/crio.sock'\n", "takes no statistics", "choose another name")

    def test_30_kubectl_without_tls_or_an_api_server(self) -> None:
        audience = "[metrics]\nlisten = '127.0.0.1:9475'\nkubectl_audience = 'infranetes'\n"
        self.checked(
            audience, r"metrics\.kubectl_audience", "needs metrics.certificate_file and metrics.key_file"
        )
        with_tls = f"{audience}certificate_file = '/c'\nkey_file = '/k'\n"
        self.checked(with_tls, r"metrics\.kubectl_audience", r"set kubernetes\.kubeconfig")

    def test_9_a_file_that_is_not_there(self) -> None:
        for words in (("config", "check", "/nonexistent.toml"), ("pods", "--config", "/nonexistent.toml")):
            said = {CTL: self.typed(*words, code=2)}
            self.told(Mistake("/nonexistent.toml: can't be read", "No such file"), said)

    def test_10_an_address_that_is_none(self) -> None:
        file = "[metrics]\nlisten = 'localhost'\n"
        self.checked(file, "'localhost' is no address", "such as 127.0.0.1:9475")
