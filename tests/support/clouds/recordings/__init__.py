# SPDX-License-Identifier: Apache-2.0
"""Scrubbed recordings of real clouds' answers, with which the simulated ones are compared."""
