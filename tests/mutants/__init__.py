# SPDX-License-Identifier: Apache-2.0
"""Puts plausible bugs into the product's modules and shows which of them no test notices."""
