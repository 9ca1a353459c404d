"""Proves a HiCache storage backend right, from outside.

``hicache-conformance --backend NAME`` is the way in; ``pytest --pyargs hicache_conformance`` runs
the same cases; ``run_case`` runs one from anybody's own test.
"""

__version__ = "0.1.0"
