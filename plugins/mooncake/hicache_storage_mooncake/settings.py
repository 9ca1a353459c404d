"""Settings under SGLang's own names, found where SGLang finds them.

SGLang 0.5.23 takes the first source that names a master: extra_config, the JSON file at
SGLANG_HICACHE_MOONCAKE_CONFIG_PATH, the environment (MOONCAKE_*). Sources are not mixed, except that
the host name of the environment always wins and that MOONCAKE_PROTOCOL fills in a missing protocol.
What Mooncake would ignore or die on is an error here, or a warning where it may be meant.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

from hicache_storage import SettingsError
from hicache_storage_mooncake.master import endpoints

logger = logging.getLogger(__name__)

CONFIG_PATH = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
HOSTNAMES = ("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME")
ENVIRONMENT = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_CLIENT": "client_server_address",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_MASTER_METRICS_PORT": "master_metrics_port",
    "MOONCAKE_CHECK_SERVER": "check_server",
    "MOONCAKE_STANDALONE_STORAGE": "standalone_storage",
    "MOONCAKE_ENABLE_SSD_OFFLOAD": "enable_ssd_offload",
    "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "ssd_offload_path",
    "MOONCAKE_TENANT_ID": "tenant_id",
}
"""Variables that SGLang reads, and the settings they stand for."""

MIN_SEGMENT_NBYTES = 16 << 20
"""Mooncake refuses a smaller segment with -600 (0.3.13.post1); 0 means to contribute none."""

DEFAULT_TENANT = "default"
INFINIBAND = Path("/sys/class/infiniband")

_UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def size_nbytes(value: object) -> int:
    """Bytes meant by a number, "4gb" or "64MiB". Units are powers of 1024, as in SGLang and Mooncake.

    Raises ValueError.
    """
    text = str(value).strip().lower().replace("ib", "b")
    unit = _UNITS.get(text[-2:])
    number = (text[:-2] if unit else text).strip()
    if isinstance(value, bool) or not number.isdigit():
        raise ValueError(f"{value!r} is not a size such as 0, 4294967296, 512mb or 4gb")
    return int(number) * (unit or 1)


Size = Annotated[int, BeforeValidator(size_nbytes)]


class MooncakeSettings(BaseModel):
    """What an operator may set. One of the three sources must name a master."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    master_server_address: str = Field(
        description="host:port of the master, or etcd://host:port;host:port where masters elect a leader"
    )
    local_hostname: str = Field("localhost", description="Name under which others reach this machine")
    metadata_server: str = Field(
        "P2PHANDSHAKE", description="P2PHANDSHAKE, http://host:port/metadata or etcd://host:port"
    )
    global_segment_size: Size = Field(
        4 << 30,
        description="Memory that this deployment contributes: bytes or 4gb, shared out among its ranks; "
        "0 for a pure client",
    )
    local_buffer_size: Size = Field(0, description="Mooncake's own staging memory; pages do not need it")
    protocol: Literal["tcp", "rdma"] = Field("rdma", description="tcp or rdma; rdma is SGLang's default")
    device_name: str = Field("", description="RDMA devices: mlx5_0,mlx5_1; empty lets Mooncake choose")
    master_metrics_port: int = Field(9003, ge=1, le=65535, description="The master's HTTP port, for stats")
    check_server: bool = Field(False, description="At the start, wait up to a minute for the master")
    tenant_id: str = Field(DEFAULT_TENANT, description="Mooncake's tenant; the master must be multi-tenant")
    replicas: int = Field(1, ge=1, le=16, description="Copies of a page on different owners, best effort")
    soft_pin: bool = Field(False, description="Evict our pages after those that are not pinned")
    hard_pin: bool = Field(False, description="Never evict our pages: a full store then refuses new ones")
    enable_ssd_offload: bool = Field(False, description="Let the segment of this process spill to disk")
    ssd_offload_path: Path | None = Field(None, description="Directory that it spills to")
    rpc_seconds: float = Field(1.0, ge=0.05, description="Longest wait for an answer of the master")
    full_seconds: float = Field(2.0, ge=0, description="How long a full store is asked again before refusing")
    lost_seconds: float = Field(10.0, ge=0, description="How long a page that could not be read is a miss")
    client_server_address: str = Field("", description="Of SGLang's standalone storage: not supported")
    standalone_storage: bool = Field(False, description="Of SGLang: not supported, L2 is not Mooncake's")
    extra_backend_tag: str = Field("", description="Of SGLang: say tenant here")
    enable_group_semantics: bool = Field(False, description="Of SGLang: not needed, a page is one object")

    @model_validator(mode="before")
    @classmethod
    def _from_first_source(cls, given: Any) -> Any:
        return with_sources(given, os.environ) if isinstance(given, Mapping) else given

    @field_validator("tenant_id", mode="before")
    @classmethod
    def _tenant(cls, value: Any) -> str:
        return str(value or "").strip() or DEFAULT_TENANT

    @field_validator("master_server_address")
    @classmethod
    def _master(cls, value: str) -> str:
        _servers_of(value)
        if value.partition("://")[0] in ("redis", "http", "https", "k8s"):
            raise ValueError("a master is host:port, or etcd://host:port;host:port")
        return value

    @field_validator("metadata_server")
    @classmethod
    def _metadata(cls, value: str) -> str:
        if value == "P2PHANDSHAKE":
            return value
        if value.startswith("redis://"):  # SIGABRT: the plugin is not compiled into any wheel
            raise ValueError("redis is in no wheel of Mooncake and aborts the process; use P2PHANDSHAKE")
        if not value.startswith(("http://", "https://", "etcd://")):
            raise ValueError("P2PHANDSHAKE, http://host:port/metadata or etcd://host:port is due")
        _servers_of(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.standalone_storage or self.client_server_address:
            raise ValueError(
                "standalone_storage needs L2 memory that Mooncake allocated; run store services instead, "
                "name their master and set global_segment_size to 0"
            )
        if self.extra_backend_tag:
            raise ValueError("extra_backend_tag is called tenant here: it salts the identity of every page")
        if 0 < self.global_segment_size < MIN_SEGMENT_NBYTES:
            raise ValueError(f"global_segment_size is 0 or at least {MIN_SEGMENT_NBYTES} bytes (16mb)")
        if self.soft_pin and self.hard_pin:
            raise ValueError("soft_pin and hard_pin exclude each other")
        self._check_rdma()
        self._check_ssd()
        if self.enable_group_semantics:
            logger.warning("enable_group_semantics has no effect: a page is one object, there is no group")
        return self

    def _check_rdma(self) -> None:
        there = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
        if self.protocol == "tcp":
            if self.device_name:
                logger.warning("device_name=%s has no effect with protocol tcp", self.device_name)
            return
        if not there:  # Mooncake would start, and move bytes inside this machine only
            raise ValueError("protocol is rdma but this machine has no RDMA device; set protocol=tcp")
        wanted = [name.strip() for name in self.device_name.split(",") if name.strip()]
        missing = [name for name in wanted if name not in there]
        if missing:
            raise ValueError(f"device_name: there is no {', '.join(missing)}; there are {', '.join(there)}")

    def _check_ssd(self) -> None:
        if self.ssd_offload_path is not None and not self.enable_ssd_offload:
            logger.warning("ssd_offload_path has no effect without enable_ssd_offload")
        if not self.enable_ssd_offload:
            return
        if self.ssd_offload_path is None:
            raise ValueError("enable_ssd_offload needs an ssd_offload_path")
        if not os.access(self.ssd_offload_path, os.W_OK | os.X_OK):
            raise ValueError(f"ssd_offload_path: {self.ssd_offload_path} is no directory we may write to")
        if self.global_segment_size == 0:
            logger.warning("enable_ssd_offload has no effect in a pure client (global_segment_size 0)")


def with_sources(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """``given`` when it names a master, else the settings file or the environment under ``given``.

    Raises ValueError saying which variable or file is wrong.
    """
    table = dict(given)
    if not (table.get("master_server_address") or table.get("client_server_address")):
        path = environment.get(CONFIG_PATH)
        table = {**(_file(path) if path else _environment(environment)), **table}
        if not table.get("master_server_address") and not table.get("client_server_address"):
            raise ValueError(
                f"no master: set master_server_address, a file at {CONFIG_PATH}, or MOONCAKE_MASTER"
            )
    if "protocol" not in table and "MOONCAKE_PROTOCOL" in environment:
        table["protocol"] = environment["MOONCAKE_PROTOCOL"]
    for name in HOSTNAMES:
        if environment.get(name):
            table["local_hostname"] = environment[name]
            break
    return table


def _environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {key: environment[name] for name, key in ENVIRONMENT.items() if name in environment}


def _file(path: str) -> dict[str, Any]:
    try:
        table = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_PATH}: {path}: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{CONFIG_PATH}: {path}: a JSON object is due")  # noqa: TRY004 (pydantic's way)
    return table


def _servers_of(address: str) -> None:
    try:
        endpoints(address)
    except SettingsError as error:
        raise ValueError(str(error)) from error
