# SPDX-License-Identifier: Apache-2.0
"""A sandbox's VM and its agent."""
