"""Wrappers that implement the contract and compose; ``open_storage`` puts them in order."""
