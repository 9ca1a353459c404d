"""Nothing of Mooncake's is called but between setup and close; memory outside L2 is refused."""

import threading

import pytest

from hicache_storage import Buffer, BufferMismatchError, ClosedError
from hicache_storage_mooncake.gate import Gate
from hicache_storage_mooncake.regions import Regions


def test_a_shut_gate_lets_nobody_in():
    gate = Gate()
    assert gate.shut()
    assert gate.emptied(0.0)
    with pytest.raises(ClosedError), gate.entered():
        pass
    assert not gate.shut()


def test_shutting_waits_for_those_inside():
    gate = Gate()
    inside = threading.Event()

    def call():
        with gate.entered():
            inside.set()
            gate.closing.wait(10)

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait(10)
    assert gate.shut()
    assert gate.emptied(10.0)
    caller.join()


def test_those_who_stay_inside_are_left_behind():
    gate = Gate()
    with gate.entered():
        assert gate.shut()
        assert not gate.emptied(0.01)


def test_pages_must_lie_in_one_registered_region():
    regions = Regions()
    regions.add(Buffer(1000, 100))
    regions.add(Buffer(1100, 100))
    regions.add(Buffer(5000, 50))
    regions.check([(Buffer(1000, 100), Buffer(5049, 1)), (Buffer(0, 0),)])
    for outside in (Buffer(999, 1), Buffer(1050, 100), Buffer(5049, 2), Buffer(3000, 1)):
        with pytest.raises(BufferMismatchError):
            regions.check([(Buffer(1000, 1), outside)])
    assert regions.remove(Buffer(1000, 100))
    assert not regions.remove(Buffer(1000, 100))
    assert regions.drain() == [Buffer(1100, 100), Buffer(5000, 50)]
    with pytest.raises(BufferMismatchError):
        regions.check([(Buffer(5000, 1),)])
