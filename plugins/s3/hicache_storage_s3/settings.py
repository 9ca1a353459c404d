"""Settings of the S3 backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, SecretStr


def _switch(value: Any) -> Any:
    # YAML and JSON writers reach for on/off and true/false, which arrive as booleans
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _prefix(value: str) -> str:
    value = value.strip("/")
    if "//" in value or ".." in value:
        raise ValueError("must not contain '//' or '..'")
    return value


def _endpoint(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return value.rstrip("/")


Switch: TypeAlias = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
Checksum: TypeAlias = Annotated[Literal["auto", "crc64nvme", "sha256", "off"], BeforeValidator(_switch)]


class S3Settings(BaseModel):
    """What an operator may set. Only ``bucket`` has no default.

    Whatever names a credential is left out here is found by the standard chain: environment
    (``AWS_*``), web identity, container, instance metadata.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bucket: str = Field(min_length=1, description="Bucket that holds the pages")
    prefix: Annotated[str, AfterValidator(_prefix)] = Field(
        "hicache", description="Put in front of every object's name; lifecycle rules and gc go by it"
    )
    endpoint: Annotated[str, AfterValidator(_endpoint)] = Field(
        "", description="URL of the service, without the bucket; empty for AWS"
    )
    region: str = Field("", description="Region; empty: AWS_REGION, or us-east-1")
    addressing: Literal["auto", "path", "virtual"] = Field(
        "auto", description="Where the bucket's name goes; auto: in the path when an endpoint is set"
    )
    access_key_id: SecretStr | None = Field(None, description="Better left to the credential chain")
    secret_access_key: SecretStr | None = Field(None, description="Better left to the credential chain")
    session_token: SecretStr | None = Field(None, description="Of temporary credentials")
    profile: str = Field(
        "", description="Profile of ~/.aws/credentials; read again every few minutes, so tokens may change"
    )
    anonymous: bool = Field(False, description="Send unsigned requests")
    ca_file: Path | None = Field(None, description="PEM file of certificates to trust besides the system's")
    proxy: SecretStr | None = Field(None, description="URL of an HTTP proxy; may carry a password")
    request_payer: bool = Field(False, description="Pay for requests to a requester-pays bucket")
    express: bool = Field(False, description="The bucket is an S3 Express One Zone directory bucket")
    create_bucket: bool = Field(False, description="Create the bucket when it does not exist")

    threads: int = Field(
        8, ge=1, le=64, description="Threads that read, as many that write, twice as many that look up"
    )
    connect_seconds: float = Field(1.0, gt=0, description="Longest time to make a connection")
    request_seconds: float = Field(
        5.0, gt=0, description="Longest time for one request; the call's deadline may be shorter"
    )
    retries: int = Field(3, ge=0, description="Times a failed request is sent again, inside the deadline")
    part_size: ByteSize = Field(
        ByteSize(16 << 20),
        ge=5 << 20,
        description="Pages larger than this are uploaded in parts of this size",
    )
    direct_get: Switch = Field(
        "auto",
        description="Read pages by presigned request straight into L2; auto: when a probe finds it works",
    )
    direct_put: Switch = Field(
        "auto",
        description="Store pages by presigned request straight from L2; auto: over plain HTTP, where the "
        "service verifies no checksum",
    )
    conditional_put: Switch = Field(
        "auto", description="Store with If-None-Match; auto: when a probe shows that it is honoured"
    )
    checksum: Checksum = Field(
        "auto",
        description="Checksum for the service to verify on upload; auto: crc64nvme where it is verified",
    )
    sign_payload: bool = Field(
        False, description="Sign the body of uploads too (SHA-256 of every byte); the checksum is cheaper"
    )

    lookup: Literal["runs", "head"] = Field(
        "runs", description="runs: a few requests answer a whole prefix; head: one request for each page"
    )
    retention_days: int = Field(
        1, ge=1, description="No lifecycle rule or gc removes pages younger than this; see the README"
    )
    positive_seconds: float = Field(
        60.0, ge=0, description="How long a page that was seen counts as present if nobody removed pages"
    )
    positive_keys: int = Field(
        200_000, ge=0, description="Most pages remembered that way (some 200 bytes each)"
    )
    absent_wave: int = Field(
        16, ge=1, description="So many absent pages in a row end a lookup: pages after them count as absent"
    )

    @property
    def plain_http(self) -> bool:
        """Whether requests go without TLS."""
        return self.endpoint.startswith("http://")

    @property
    def path_style(self) -> bool:
        """Whether the bucket's name goes into the path instead of the host name."""
        return self.addressing == "path" or (self.addressing == "auto" and bool(self.endpoint))

    def model_post_init(self, _: object) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        given = [self.access_key_id is not None, bool(self.profile), self.anonymous]
        if sum(given) > 1:
            raise ValueError("give one of access_key_id, profile and anonymous")
        if self.express and (self.endpoint or not self.bucket.endswith("--x-s3")):
            raise ValueError("express: such a bucket is AWS's (no endpoint) and its name ends with --x-s3")
        if self.direct_put == "on" and (self.sign_payload or self.checksum not in ("auto", "off")):
            raise ValueError("direct_put sends no checksum and signs no payload: turn it off, or those")
