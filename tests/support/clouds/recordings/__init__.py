# SPDX-License-Identifier: Apache-2.0
"""Recordings of what real clouds answer, scrubbed, that the simulated ones are compared with."""
