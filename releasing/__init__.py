# SPDX-License-Identifier: Apache-2.0
"""A release: its version, changelog, tag and artifacts, all made in a clone first."""
