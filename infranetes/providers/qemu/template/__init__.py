# SPDX-License-Identifier: Apache-2.0
"""The template, which is booted once: each pod's VM is its clone."""
