# SPDX-License-Identifier: Apache-2.0
"""Google's own library for credentials, with whose requests ours are compared. It runs in a process of its
own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.clouds import wheels

RELEASE = "google-auth"
_HOSTS = ("sts", "iamcredentials", "oauth2")
_NOWHERE = "http://127.0.0.1:9"  # where it would ask Google itself
_SCRIPT = """
import json, sys
from google.auth import aws, identity_pool
from google.auth.transport.requests import Request
from google.oauth2 import credentials, service_account

scope, url = sys.argv[1:]
info = json.load(sys.stdin)
if info["type"] == "service_account":
    found = service_account.Credentials.from_service_account_info(info, scopes=[scope])
elif info["type"] == "authorized_user":
    found = credentials.Credentials.from_authorized_user_info(info, scopes=[scope])
    found._token_uri = f"{url}/token"  # there is no other way
else:
    kind = aws if "environment_id" in info["credential_source"] else identity_pool
    found = kind.Credentials.from_info(info, scopes=[scope])
found.refresh(Request())
print(found.token)
"""


def _thd_token(content: Mapping[str, object], scope: str, url: str, directory: Path) -> str:
    """Get a token with a file of credentials.

    :param url: in place of Google's. :param directory: that the library is unpacked to."""
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        archive.extractall(directory)
    text = json.dumps(content)
    for host in _HOSTS:
        text = text.replace(f"https://{host}.googleapis.com", url)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, scope, url],
        input=text,
        env={**os.environ, "PYTHONPATH": str(directory), "https_proxy": _NOWHERE},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
