"""NIXL's storage plugins: what each is called, what it moves, and what it may be told.

Names and values are NIXL's own, so that its documentation and SGLang's configuration files apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hicache_storage import SettingsError

Kind = Literal["FILE", "OBJ"]


class Params(BaseModel):
    """Initial parameters of a plugin; NIXL takes them as text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def texts(self) -> dict[str, str]:
        """What NIXL is given: only what was set, since its own defaults differ by version."""
        return {key: _text(value) for key, value in self.model_dump(exclude_unset=True).items()}


class PosixParams(Params):
    """Linux asynchronous I/O on files of any mounted file system."""

    use_aio: bool = Field(True, description="Kernel AIO through libaio; the default")
    use_uring: bool = Field(False, description="io_uring, where the kernel and the container allow it")
    ios_pool_size: int = Field(65536, ge=1024, description="Descriptors of all transfers in flight")
    kernel_queue_size: int = Field(256, ge=1, description="Requests the kernel is given at a time")

    def texts(self) -> dict[str, str]:
        """NIXL's default is its own choice between the two; ours is explicit."""
        way = {"use_uring": "true"} if self.use_uring else {"use_aio": "true"}
        return {k: v for k, v in super().texts().items() if not k.startswith("use_")} | way


class GdsParams(Params):
    """GPUDirect Storage, batches of cuFile."""

    batch_pool_size: int = Field(128, ge=1, description="Batches that may be in flight")
    batch_limit: int = Field(128, ge=1, description="Requests in one batch")
    max_request_size: int = Field(16 << 20, ge=4096, description="Largest single request in bytes")


class GdsMtParams(Params):
    """GPUDirect Storage, one cuFile call a thread."""

    thread_count: int = Field(4, ge=1, description="Threads that call cuFile")


class Hf3fsParams(Params):
    """3FS through its user-space client; its file system must be mounted."""

    mount_point: str = Field("", description="Where 3FS is mounted, such as /mnt/3fs")
    mem_config: Literal["dram", "dram_zc", "auto"] = Field("auto", description="How L2 is shared with 3FS")
    iopool_size: int = Field(64, ge=64, le=1 << 20, description="Size of the I/O pool")


class ObjParams(Params):
    """S3 and what speaks like it."""

    bucket: str = Field("", description="Default: AWS_DEFAULT_BUCKET")
    endpoint_override: str = Field("", description="http://host:port of a store that is not AWS")
    scheme: str = Field("", description="http or https")
    region: str = Field("", description="Default: as the AWS SDK finds it")
    access_key: str = Field("", description="Default: as the AWS SDK finds it", repr=False)
    secret_key: str = Field("", description="Default: as the AWS SDK finds it", repr=False)
    session_token: str = Field("", description="Of temporary credentials", repr=False)
    use_virtual_addressing: bool = Field(False, description="bucket.host instead of host/bucket")
    req_checksum: Literal["required", "supported"] = Field(
        "required", description="When a request carries a checksum"
    )
    ca_bundle: str = Field("", description="File of certificates to trust")
    num_threads: int = Field(4, ge=1, description="Threads that talk to the store")
    crtMinLimit: int = Field(0, ge=0, description="Objects from here on go through the CRT client")  # noqa: N815
    throughput_target_gbps: int = Field(10, ge=1, description="What the CRT client aims for")


class AzureBlobParams(Params):
    """Azure Blob Storage."""

    account_url: str = Field("", description="https://<account>.blob.core.windows.net")
    container_name: str = Field("", description="Default: AZURE_STORAGE_CONTAINER_NAME")
    connection_string: str = Field("", description="Instead of an account_url", repr=False)
    ca_bundle: str = Field("", description="File of certificates to trust")
    num_threads: int = Field(4, ge=1, description="Threads that talk to the store")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One of NIXL's plugins as far as we know it."""

    nixl_name: str
    kind: Kind
    params: type[Params] | None
    """What it may be told; None when only NIXL knows."""


PLUGINS = {
    "hf3fs": Plugin("HF3FS", "FILE", Hf3fsParams),
    "posix": Plugin("POSIX", "FILE", PosixParams),
    "gds_mt": Plugin("GDS_MT", "FILE", GdsMtParams),
    "gds": Plugin("GDS", "FILE", GdsParams),
    "obj": Plugin("OBJ", "OBJ", ObjParams),
    "azure_blob": Plugin("AZURE_BLOB", "OBJ", AzureBlobParams),
}
"""By the name that a user gives."""

AUTO = ("hf3fs", "posix", "gds_mt", "gds", "obj")
"""The order in which ``auto`` tries them, as SGLang documents it."""

ALIASES = {"3fs": "hf3fs", "azure": "azure_blob"}


def find(name: str) -> Plugin:
    """The plugin called ``name``, in any case; one we know nothing of is taken to move files."""
    lower = name.lower()
    return PLUGINS.get(ALIASES.get(lower, lower)) or Plugin(name.upper(), "FILE", None)


def checked(name: str, given: Mapping[str, Any]) -> dict[str, str]:
    """What NIXL is to be told out of what the user has given. Raises SettingsError naming the key."""
    model = find(name).params
    if model is None:
        return {key: _text(value) for key, value in given.items()}
    for key in given:
        if key not in model.model_fields:
            near = get_close_matches(key, model.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(model.model_fields)}"
            raise SettingsError(f"params: {name} has no parameter {key!r}; {hint}")
    try:
        return model.model_validate(given).texts()
    except ValidationError as error:
        # input values are left out on purpose: they may be secrets
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)]
        raise SettingsError(f"params of {name}: {'; '.join(lines)}") from None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
