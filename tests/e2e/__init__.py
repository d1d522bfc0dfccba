# SPDX-License-Identifier: Apache-2.0
"""Tests with real VMs, and of the packages in clean roots."""

from tests.harness.needs import ROOT_USER, VMS

NEEDS = (ROOT_USER, VMS)
