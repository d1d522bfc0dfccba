# SPDX-License-Identifier: Apache-2.0
"""A VM as the daemon knows it."""
