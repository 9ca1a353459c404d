"""Which plugin is used, what it is told, and what is said when it cannot be."""

from importlib.metadata import PackageNotFoundError

import pytest

from hicache_storage import SettingsError
from hicache_storage.settings import read_table, split_settings
from hicache_storage_nixl import NixlSettings, NixlStorage, doctor, library
from hicache_storage_nixl.plugins import PLUGINS, checked

SGLANG_FORM = """
use_direct_io = false
l3_cleaner_enabled = true
l3_cleaner_high_watermark = 80.0

[plugin.posix]
use_uring = "true"
active = true

[plugin.gds]
batch_pool_size = 128

[plugin.obj]
endpoint_override = ""
secrete_key = "x"
"""


def settings(**table):
    return split_settings(table, "nixl", NixlSettings, {})[1]


def test_auto_takes_the_first_that_initialises_and_says_why_not_the_others(root, namespace):
    with NixlStorage(settings(root=str(root)), namespace) as storage:
        said = storage.describe()
    assert said["plugin"] == "POSIX"
    assert "not HF3FS: this wheel has no plugin HF3FS" in said["chosen"]


def test_a_listed_plugin_whose_library_is_missing_is_refused_by_the_librarys_name(root, namespace):
    problem = library.problem_with(library.load(), "GDS")
    if not problem:
        pytest.skip("this machine has cuFile")
    with pytest.raises(SettingsError, match=r"GDS.*\.so"):
        NixlStorage(settings(plugin="gds", root=str(root)), namespace)


def test_a_plugin_that_is_told_nonsense_says_so(root, namespace):
    with pytest.raises(SettingsError, match="did you mean 'use_uring'"):
        NixlStorage(settings(plugin="posix", root=str(root), params={"use_urin": True}), namespace)
    with pytest.raises(SettingsError, match="ios_pool_size"):
        NixlStorage(settings(plugin="posix", root=str(root), params={"ios_pool_size": 1}), namespace)
    with pytest.raises(SettingsError, match="NOSUCH"):
        NixlStorage(settings(plugin="nosuch", root=str(root)), namespace)
    with pytest.raises(SettingsError, match="bucket"):
        NixlStorage(settings(plugin="obj"), namespace)
    with pytest.raises(SettingsError, match="params"):
        settings(params={"use_uring": True})
    with pytest.raises(SettingsError, match="pluggin"):
        settings(pluggin="posix")


def test_secrets_are_not_in_what_is_said():
    with pytest.raises(SettingsError) as caught:
        checked("obj", {"secret_key": ["hush"]})
    assert "hush" not in str(caught.value)


def test_sglangs_file_is_understood(tmp_path, root, namespace):
    path = tmp_path / "config.nixl.toml"
    path.write_text(SGLANG_FORM)
    found = settings(**read_table(f"@{path}"), root=str(root))
    assert (found.plugin, found.params, found.direct_io) == ("posix", {"use_uring": "true"}, "off")
    with NixlStorage(found, namespace) as storage:
        assert storage.describe()["direct_io"] == "never: switched off"


def test_sglangs_table_without_an_active_plugin_leaves_the_choice_to_auto():
    found = settings(plugin={"posix": {"use_uring": "true"}, "3fs": {"mem_config": "dram"}})
    assert found.plugin == "auto"
    assert found.told("posix") == {"use_uring": "true"}
    assert found.told("hf3fs") == {"mem_config": "dram"}


def test_every_setting_is_described():
    models = [NixlSettings, *[plugin.params for plugin in PLUGINS.values()]]
    assert all(field.description for model in models for field in model.model_fields.values())


def test_without_nixl_the_error_names_the_extras(monkeypatch):
    def none(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", none)
    with pytest.raises(ImportError, match=r"hicache-storage-nixl\[cu12\]"):
        library.load()
    assert doctor.doctor()[0][1] is False
    monkeypatch.setattr(library, "version", lambda name: "1.4.1")
    with pytest.raises(ImportError, match="too old"):
        library.load()


def test_doctor_names_what_can_be_loaded_and_what_is_missing():
    found = {what: (fine, said) for what, fine, said in doctor.doctor()}
    assert found["plugin posix"] == (True, "loadable")
    assert found["plugin hf3fs"][1] == "this wheel has no plugin HF3FS"
    assert "posix" in found["storage plugins"][1]
