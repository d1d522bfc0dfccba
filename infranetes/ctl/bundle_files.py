# SPDX-License-Identifier: Apache-2.0
"""The files of a support bundle, without the secrets that are in them."""

from __future__ import annotations

import json
from collections.abc import Iterable

import attrs

from infranetes.ctl import host
from infranetes.ctl.secrets.scrubber import Scrubber
from txgrpc import GrpcError

MAX_PART = 8 << 20  # bytes


@attrs.define
class Bundle:
    """The files of a bundle by their names, with the secrets that are in them, and why others are missing.

    :ivar texts: those that are text. :ivar documents: those that are JSON."""

    texts: dict[str, str] = attrs.field(factory=dict)
    documents: dict[str, object] = attrs.field(factory=dict)
    missing: dict[str, str] = attrs.field(factory=dict)

    def lacks(self, name: str, error: Exception) -> None:
        """Note why a file is missing."""
        why = error.message or error.code.name if isinstance(error, GrpcError) else str(error)
        self.missing[name] = why or type(error).__name__

    def cleaned(self, secrets: Iterable[str]) -> dict[str, bytes]:
        """Return all files without secrets, each cut at MAX_PART. Blocks."""
        scrubber = Scrubber(secrets)
        self.missing = {scrubber.clean(name): scrubber.clean(why) for name, why in self.missing.items()}
        self.documents["manifest.json"] = {"versions": host.versions(), "missing": self.missing}
        found = {name: scrubber.clean(text) for name, text in self.texts.items()}
        for name, document in self.documents.items():  # before they are JSON, in which texts are escaped
            found[name] = json.dumps(scrubber.clean_document(document), indent=2, default=str) + "\n"
        return {name: found[name].encode(errors="replace")[:MAX_PART] for name in sorted(found)}
