"""Ports of the node that lead to pods."""
