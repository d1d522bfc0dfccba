"""Pods as instances of a cloud: what all clouds share, with a package for each one."""
