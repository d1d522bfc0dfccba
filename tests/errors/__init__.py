# SPDX-License-Identifier: Apache-2.0
"""Mistakes that operators make: what is said names the cause and the way out, wherever they look."""
