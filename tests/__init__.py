# SPDX-License-Identifier: Apache-2.0
"""Infranetes' tests: ``python -m tests`` runs them all, ``trial tests.PACKAGE.MODULE`` some of them.

Importing a test sets up trial for it (`tests.harness.trial`). The demo and the benches use `tests.support`
alone: they start sooner without that, and where the libraries of tests are not installed.
"""

from __future__ import annotations

import sys

if sys.modules.keys().isdisjoint({"demo", "bench"}):
    from tests.harness.trial import set_up_trial

    set_up_trial()
