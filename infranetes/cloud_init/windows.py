# SPDX-License-Identifier: Apache-2.0
"""A script of PowerShell by which a Windows with OpenSSH lets its node in, for cloudbase-init."""

from __future__ import annotations

import base64

from infranetes.cloud_init.boot_script import KEY_COMMENT
from infranetes.cloud_init.document import GuestDocument

_SCRIPT = """\
#ps1_sysnative
$ErrorActionPreference = 'Stop'
$ssh = Join-Path $env:ProgramData 'ssh'
New-Item -ItemType Directory -Force -Path $ssh | Out-Null
function Put($name, $content) {
    $path = Join-Path $ssh $name
    [IO.File]::WriteAllText($path, $content)
    # sshd takes a file only if nobody else may read it: SYSTEM and Administrators, in every language.
    icacls.exe $path /inheritance:r /grant '*S-1-5-18:F' '*S-1-5-32-544:F' | Out-Null
}
function Text($base64) { [Text.Encoding]::UTF8.GetString([Convert]::FromBase64String($base64)) }
"""


def windows_script(document: GuestDocument) -> str:
    """Return the script. "": nothing is to be done."""
    script = ""
    if document.node_key:
        line = " ".join([*document.node_key.split()[:2], KEY_COMMENT])
        script += (
            "$name = 'administrators_authorized_keys'\n"
            "$keys = @(Get-Content (Join-Path $ssh $name) -ErrorAction SilentlyContinue | "
            f"Where-Object {{ $_ -notlike '* {KEY_COMMENT}' }})\n"
            f'Put $name ((($keys + (Text \'{_base64(line)}\')) -join "`n") + "`n")\n'
        )
    if document.host_key is not None:
        script += f"Put 'ssh_host_ed25519_key' (Text '{_base64(document.host_key.private)}')\n"
        script += f"Put 'ssh_host_ed25519_key.pub' (Text '{_base64(document.host_key.public)}')\n"
        script += "Restart-Service sshd -ErrorAction SilentlyContinue\n"
    return _SCRIPT + script if script else ""


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
