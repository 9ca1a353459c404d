"""The commands that look after a bucket."""

import json
import time

import pytest
from typer.testing import CliRunner

from hicache_storage_s3.commands import app


@pytest.fixture
def run(ministack, namespace, monkeypatch):
    for name, value in ministack.settings(checksum="off", prefix=f"commands-{namespace.epoch}").items():
        monkeypatch.setenv(f"HICACHE_S3_{name.upper()}", value)

    def run_one(*words, status=0):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == status, result.output + repr(result.exception)
        return result.stdout

    return run_one


@pytest.fixture
def storage(opened, namespace):
    return opened(prefix=f"commands-{namespace.epoch}")


def store(storage, namespace, tools, count, nbytes=1000, start=0):
    keys = namespace.keys([f"page-{i}" for i in range(start, start + count)])
    assert all(storage.batch_set_from(keys, [tools.filled(key, nbytes) for key in keys]))
    return keys


def test_lifecycle_rules_are_printed(run, namespace):
    rule = json.loads(run("lifecycle", "--days", "7"))["Rules"][0]
    assert rule["Expiration"] == {"Days": 7}
    assert rule["Filter"] == {"Prefix": f"commands-{namespace.epoch}/"}


def test_lifecycle_rules_are_applied_and_others_stay(run, ministack):
    import boto3

    keys = {"aws_access_key_id": ministack.key_id, "aws_secret_access_key": ministack.secret}
    s3 = boto3.client("s3", endpoint_url=ministack.endpoint, region_name="us-east-1", **keys)
    other = {"ID": "other", "Status": "Enabled", "Filter": {"Prefix": "x/"}, "Expiration": {"Days": 3}}
    s3.put_bucket_lifecycle_configuration(Bucket="pages", LifecycleConfiguration={"Rules": [other]})
    for days in ("7", "9"):
        run("lifecycle", "--days", days, "--apply")
    rules = s3.get_bucket_lifecycle_configuration(Bucket="pages")["Rules"]
    assert sorted((rule["ID"].split()[0], rule["Expiration"]["Days"]) for rule in rules) == [
        ("hicache", 9),
        ("other", 3),
    ]


def test_gc_to_a_size_removes_the_oldest_and_lookups_know(run, storage, namespace, tools):
    old = store(storage, namespace, tools, 10)
    time.sleep(1.1)  # S3 tells the time in seconds
    new = store(storage, namespace, tools, 10, start=10)
    assert all(storage.batch_exists(old))
    assert "would remove 1" in run("gc", "--to", "11000", "--dry-run")
    assert all(storage.batch_exists(old))
    run("gc", "--to", "14000")
    assert all(storage.batch_exists(new))
    assert not all(storage.batch_exists(old))


def test_gc_by_age_removes_nothing_young(run, storage, namespace, tools):
    keys = store(storage, namespace, tools, 3)
    assert "removed 0 objects" in run("gc", "--older-than", "1h")
    assert all(storage.batch_exists(keys))
    time.sleep(1.1)
    run("gc", "--older-than", "0m")
    assert not any(storage.batch_exists(keys))


def test_clear_takes_the_start_of_a_digest(run, storage, namespace, tools):
    keys = store(storage, namespace, tools, 20)
    assert all(storage.batch_exists(keys))
    run("clear", "--namespace", "no-such", "--yes", status=2)
    run("clear", "--namespace", namespace.digest[:8], "--yes")
    assert not any(storage.batch_exists(keys))


@pytest.mark.parametrize(
    "words", [("gc",), ("gc", "--to", "1GB", "--older-than", "1h"), ("gc", "--to", "much"), ("clear",)]
)
def test_a_question_that_is_not_clear_is_refused(run, words):
    run(*words, status=2)
