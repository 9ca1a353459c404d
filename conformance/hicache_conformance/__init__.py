"""Proves a HiCache storage backend right, from outside."""

__version__ = "0.1.0"
