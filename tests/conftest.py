"""Fixtures that more than one test module needs."""

import gc
import os
import threading

import pytest


@pytest.fixture
def no_leaks():
    """Fails the test when it leaves threads or file descriptors behind."""
    gc.collect()
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert set(threading.enumerate()) - threads == set()
    left = set(os.listdir("/proc/self/fd")) - descriptors
    open_files = []
    for fd in left:
        try:
            open_files.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    assert open_files == []
