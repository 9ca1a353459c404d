"""What has to be right on this machine before Mooncake can work, checked one by one."""

from __future__ import annotations

import os
import resource

from hicache_storage import StorageError
from hicache_storage_mooncake import library
from hicache_storage_mooncake.master import Master
from hicache_storage_mooncake.settings import INFINIBAND, MooncakeSettings, with_sources

PROBE_SECONDS = 1.0
TYPICAL_L2_NBYTES = 64 << 30

Finding = tuple[str, bool, str]
"""What was checked, whether it is right, and what was found or what to do."""


def doctor(
    master: str | None = None, metrics_port: int | None = None, protocol: str | None = None
) -> list[Finding]:
    """All findings; what is not given is looked for where SGLang looks for it: a file, the environment.

    Where nothing names a master, nothing of a deployment is looked at.
    """
    table = _configured()
    if not table and not master:
        found = "none is configured here: MOONCAKE_MASTER, a settings file, or --master"
        return [_wheels(), _import(), ("master", True, found)]
    if metrics_port:
        table["master_metrics_port"] = metrics_port
    if master:
        table["master_server_address"] = master
    protocol = protocol or str(table.get("protocol", MooncakeSettings.model_fields["protocol"].default))
    findings = [_wheels(), _import()]
    findings += [_rdma(), _memlock()] if protocol == "rdma" else [("rdma", True, "not used: protocol is tcp")]
    return [*findings, _master(str(table.get("master_server_address", "")), table.get("master_metrics_port"))]


def _configured() -> dict[str, object]:
    try:
        return with_sources({}, os.environ)
    except ValueError:
        return {"protocol": os.environ["MOONCAKE_PROTOCOL"]} if "MOONCAKE_PROTOCOL" in os.environ else {}


def _wheels() -> Finding:
    found = library.wheels()
    named = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        return "mooncake wheels", False, f"{named} overwrite each other's files: uninstall all, install one"
    return "mooncake wheels", bool(found), named or library.explain("no distribution of Mooncake")


def _import() -> Finding:
    try:
        library.load()
    except library.MooncakeMissingError as error:
        return "mooncake.store", False, str(error)
    return "mooncake.store", True, "imports"


def _rdma() -> Finding:
    devices = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if not devices:
        return "rdma devices", False, "none; set protocol=tcp (rdma is SGLang's default)"
    return "rdma devices", True, ", ".join(devices)


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "locked memory", True, "unlimited"
    message = f"{soft} bytes may be locked; RDMA locks all of L2: ulimit -l unlimited"
    return "locked memory", soft >= TYPICAL_L2_NBYTES, message


def _master(address: str, metrics_port: object) -> Finding:
    if not address:
        return "master", False, "none is named: MOONCAKE_MASTER, a settings file, or --master"
    try:
        master = Master(address, int(str(metrics_port or 9003)))
    except (StorageError, ValueError) as error:
        return "master", False, str(error)
    if not master.reachable(PROBE_SECONDS):
        return "master", False, f"{address} does not answer: is it down, hung, or behind a firewall?"
    counted = ", ".join(f"{fact} {value}" for fact, value in master.counters().items())
    return "master", True, f"{address} answers ({counted or 'its metrics cannot be read'})"
