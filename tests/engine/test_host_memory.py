"""L2's memory: what it is made of, and errors that name the limit which is short."""

import mmap
import resource
from pathlib import Path

import pytest
import torch

from hicache_storage import SettingsError, StorageError
from hicache_storage.buffers import Buffer
from hicache_storage.engine import KVShape, TierEngine, host_memory
from hicache_storage.engine.host_memory import HUGE_PAGES, allocate, check_hugepages, pin
from hicache_storage.engine.memory_limits import headroom, memlock_shortage

SHAPE = KVShape.parse("mla:2x64:bf16")
MEMINFO = "MemTotal: 64 kB\nMemAvailable:    1000 kB\nHugepagesize:       2048 kB\n"


@pytest.fixture
def machine(tmp_path):
    """A /proc with 1000 kB available, and cgroups to be written by the test."""

    def write(path, text):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    write("proc/meminfo", MEMINFO)
    write.root = tmp_path
    return write


def cgroup_v2(write, directory, limit, used, cache=0):
    write(f"{directory}/memory.max", f"{limit}\n")
    write(f"{directory}/memory.high", "max\n")
    write(f"{directory}/memory.current", f"{used}\n")
    write(f"{directory}/memory.stat", f"anon 5\nactive_file 0\ninactive_file {cache}\n")


def test_without_cgroups_the_host_has_what_it_says(machine):
    assert headroom(machine.root / "proc").nbytes == 1_024_000


def test_a_system_that_does_not_say_sets_no_limit(tmp_path):
    assert headroom(tmp_path) is None


def test_the_tightest_cgroup_on_the_way_up_counts(machine):
    root = machine.root / "sys"
    machine("proc/self/cgroup", "0::/pod/container\n")
    machine("proc/self/mountinfo", f"30 23 0:26 / {root} rw - cgroup2 cgroup2 rw\n")
    cgroup_v2(machine, "sys/pod/container", "max", 500_000)
    cgroup_v2(machine, "sys/pod", 800_000, 600_000)
    left = headroom(machine.root / "proc")
    assert left.nbytes == 200_000
    assert left.limit == f"cgroup limit {root}/pod/memory.max"


def test_page_cache_of_a_cgroup_can_be_had(machine):
    machine("proc/self/cgroup", "0::/\n")
    machine("proc/self/mountinfo", f"30 23 0:26 / {machine.root}/sys rw - cgroup2 cgroup2 rw\n")
    cgroup_v2(machine, "sys", 800_000, 600_000, cache=350_000)
    assert headroom(machine.root / "proc").nbytes == 550_000


def test_a_container_sees_its_own_cgroup_as_the_root_of_the_mount(machine):
    """cgroup v1 without a cgroup namespace, as docker made it."""
    machine("proc/self/cgroup", "9:cpu:/docker/abc\n4:memory:/docker/abc\n")
    machine(
        "proc/self/mountinfo",
        f"35 31 0:32 /docker/abc {machine.root}/sys rw - cgroup cgroup rw,memory\n"
        f"36 31 0:33 /docker/abc {machine.root}/other rw - cgroup cgroup rw,cpu\n",
    )
    machine("sys/memory.limit_in_bytes", "300000\n")
    machine("sys/memory.usage_in_bytes", "100000\n")
    machine("sys/memory.stat", "cache 0\ntotal_active_file 10\ntotal_inactive_file 20\n")
    left = headroom(machine.root / "proc")
    assert left.nbytes == 200_030
    assert "memory.limit_in_bytes" in left.limit


def test_l2_that_is_over_a_cgroups_limit_is_refused_by_name(machine, monkeypatch):
    machine("proc/self/cgroup", "0::/\n")
    machine("proc/self/mountinfo", f"30 23 0:26 / {machine.root}/sys rw - cgroup2 cgroup2 rw\n")
    cgroup_v2(machine, "sys", 800_000, 600_000)
    monkeypatch.setattr(host_memory, "headroom", lambda: headroom(machine.root / "proc"))
    with pytest.raises(MemoryError, match=r"0\.20 MB are left \(cgroup limit .*/sys/memory.max\); lower"):
        TierEngine(SHAPE, 64, l1_tokens=6400)


def test_memory_is_taken_when_it_is_used_or_at_once_when_asked():
    nbytes = 8 << 20
    for prefault, resident in ((False, 0), (True, nbytes)):
        memory = allocate(nbytes, prefault=prefault)
        address = Buffer.of(memory).address
        assert _resident(address) == resident
        memory.close()


def _resident(address):
    """Bytes of the mapping that are in memory, by the kernel's account."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first, _, rest = line.partition("-")
        if rest and " " in rest and int(first, 16) <= address < int(rest.split()[0], 16):
            rss = next(entry for entry in lines if entry.startswith("Rss:"))
            return int(rss.split()[1]) * 1024
    return None


def test_huge_pages_that_are_not_there_are_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    pool = tmp_path / "hugepages-2048kB"
    pool.mkdir()
    (pool / "nr_hugepages").write_text("4\n")
    (pool / "free_hugepages").write_text("1\n")
    monkeypatch.setattr(host_memory, "_SYSTEM", tmp_path)

    def none(*_arguments, **_options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(
        MemoryError, match=r"needs 3 huge pages of 2 MiB, and 1 of 4 are free: write 6 or more"
    ):
        allocate((4 << 20) + 1, "2MB")
    with pytest.raises(MemoryError, match=r"needs 1 huge pages of 1024 MiB, and this kernel has none"):
        allocate(1, "1GB")


def _free_huge_pages():
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(free.read_text()) if free.exists() else 0


@pytest.mark.skipif(_free_huge_pages() < 2, reason="needs 2 free huge pages: sysctl vm.nr_hugepages=2")
def test_huge_pages_are_what_was_asked_for():
    before = _free_huge_pages()
    memory = allocate((2 << 20) + 1, "2MB", prefault=True)
    assert len(memory) == 4 << 20
    assert Buffer.of(memory).address % (2 << 20) == 0
    assert _free_huge_pages() == before - 2


def test_an_engine_runs_on_the_huge_pages_that_it_was_given(monkeypatch):
    monkeypatch.setattr(
        host_memory, "_allocate_huge", lambda nbytes, size, _flags: mmap.mmap(-1, -(-nbytes // size) * size)
    )
    with TierEngine(SHAPE, 64, l1_tokens=640, hugepages="2MB") as engine:
        assert "huge pages of 2MB" in engine.memory_kind
        assert engine.l2_nbytes == 20 * SHAPE.page_nbytes(64)  # the rest of the last huge page is nobody's
        assert engine.prefill(list(range(640))).wrong_bytes == 0


def test_a_size_of_huge_pages_that_is_not_there_names_the_choices():
    with pytest.raises(SettingsError, match="hugepages '4MB' is none of: 2MB, 1GB"):
        check_hugepages("4MB")
    assert set(HUGE_PAGES) == {"2MB", "1GB"}


@pytest.fixture
def little_memlock():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.usefixtures("little_memlock")
def test_the_limit_of_locked_memory_is_told_with_its_value_and_its_cure():
    assert memlock_shortage(65536) == ""
    shortage = memlock_shortage(12 * 10**9)
    assert "RLIMIT_MEMLOCK is 0.07 MB and L2 has 12.00 GB" in shortage
    assert "ulimit -l unlimited" in shortage


@pytest.mark.usefixtures("little_memlock")
def test_memory_that_cuda_cannot_pin_names_the_limit(monkeypatch):
    class Runtime:
        @staticmethod
        def cudaHostRegister(*_):  # noqa: N802 - CUDA's name
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(MemoryError, match=r"error 2\); RLIMIT_MEMLOCK is"):
        pin(Buffer.of(bytearray(1 << 20)))


@pytest.mark.usefixtures("little_memlock")
def test_a_storage_that_cannot_register_l2_may_lack_locked_memory(storage, monkeypatch, caplog):
    def refuse(_buffer):
        raise StorageError("cannot allocate memory")

    monkeypatch.setattr(storage, "register_buffer", refuse)
    with pytest.raises(StorageError, match="cannot allocate memory"):
        TierEngine(SHAPE, 64, l1_tokens=6400, storage=storage)
    assert "RLIMIT_MEMLOCK is 0.07 MB" in caplog.text
