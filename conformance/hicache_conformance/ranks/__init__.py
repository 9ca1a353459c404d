"""Ranks that prefetch together: the protocol, and two ways to run it (simulated, and over gloo)."""
