"""Settings say what is wrong with them."""

import pytest
from pydantic import ValidationError

from hicache_storage import SettingsError
from hicache_storage.directory.settings import room_nbytes
from hicache_storage_file import FileSettings, FileStorage


@pytest.mark.parametrize(
    ("room", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("200GB", 200 * 10**9),
        ("4gb", 4 * 10**9),
        ("1TiB", 1 << 40),
        ("1.5 MiB", 3 << 19),
        ("50%", 500),
        ("0%", 0),
        (" 12.5% ", 125),
    ],
)
def test_room_is_bytes_or_a_share_of_the_disk(room, nbytes):
    assert room_nbytes(room, 1000) == nbytes


@pytest.mark.parametrize("room", ["", "lots", "101%", "-1%", "x%", "5 parsecs", -1, "-5"])
def test_room_that_is_neither_is_refused(room):
    with pytest.raises(ValueError, match=r"is not|negative"):
        room_nbytes(room, 1000)
    with pytest.raises(ValidationError):
        FileSettings(root="/x", capacity=room)


def test_every_setting_is_described():
    assert all(field.description for field in FileSettings.model_fields.values())


def test_watermarks_must_be_in_order():
    with pytest.raises(ValidationError, match="low_watermark"):
        FileSettings(root="/x", low_watermark=0.9, high_watermark=0.8)


@pytest.mark.parametrize(("given", "taken"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_yaml_spells_on_and_off_as_booleans(given, taken):
    assert FileSettings(root="/x", direct_io=given).direct_io == taken


def test_unknown_settings_are_refused():
    with pytest.raises(ValidationError, match="capcity"):
        FileSettings(root="/x", capcity="1GB")


def test_a_store_without_room_is_refused(root, namespace):
    with pytest.raises(SettingsError, match="capacity"):
        FileStorage(FileSettings(root=root, capacity=0), namespace)


def test_a_disk_below_min_free_is_mentioned_at_once(opened, caplog):
    opened(min_free="100%")
    assert "min_free" in caplog.text
