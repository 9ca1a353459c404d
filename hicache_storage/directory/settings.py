"""Settings of a directory of pages, and sizes given as bytes or as a share of the disk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter

_BYTES = TypeAdapter(ByteSize)


def room_nbytes(room: int | str, disk_nbytes: int) -> int:
    """Bytes meant by ``room``: a number, "200GB", "1TiB", or "50%" of a disk of ``disk_nbytes``.

    Raises ValueError when it is none of these, or negative.
    """
    text = str(room).strip()
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{room!r} is not a share of the disk between 0% and 100%")
        return int(share * disk_nbytes)
    try:
        nbytes = int(_BYTES.validate_python(text))
    except ValueError:
        raise ValueError(f"{room!r} is not a size such as 200GB, 1TiB, 50% or a number of bytes") from None
    if nbytes < 0:
        raise ValueError(f"{room!r} is negative")
    return nbytes


def _checked(room: int | str) -> int | str:
    room_nbytes(room, 0)
    return room


def _mode(value: Any) -> Any:
    # YAML and JSON writers reach for on/off and true/false, which arrive as booleans
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Room = Annotated[int | str, AfterValidator(_checked)]

DirectIO = Annotated[Literal["auto", "on", "off"], BeforeValidator(_mode)]


class RoomSettings(BaseModel):
    """How much of a disk the pages may take. To be inherited by the settings of a backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity: Room = Field(
        "50%",
        description="Most that the pages of all namespaces under root may take: 200GB, 1TiB, 50% of the disk",
    )
    min_free: Room = Field(
        "5%", description="Room to leave on the disk whoever fills it: pages are evicted to keep it free"
    )
    high_watermark: float = Field(0.95, gt=0, le=1, description="Share of capacity at which eviction starts")
    low_watermark: float = Field(0.90, gt=0, le=1, description="Share of capacity at which eviction ends")

    def model_post_init(self, _: object) -> None:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark is above high_watermark")
