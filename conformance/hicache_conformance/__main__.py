"""``python -m hicache_conformance`` is ``hicache-conformance``."""

from hicache_conformance.cli import main

main()
