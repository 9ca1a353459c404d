"""Replays of request streams through the tier engine: what a cache could save, and what it did.

Importing a module of this package may load torch and pyarrow (``[engine]``).
"""
