"""What the tiers of this machine can do: ``hicache-storage bench``. Needs torch (``[model]`` for TTFT)."""
