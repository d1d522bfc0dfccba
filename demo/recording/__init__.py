# SPDX-License-Identifier: Apache-2.0
"""A recording of `make demo` as an animated picture, made of a real run."""
