"""What goes wrong at the start is said clearly, and no secret is ever shown."""

import logging

import faulty
import pytest

from hicache_storage import AccessDeniedError, SettingsError, Status, StorageError, UnavailableError
from hicache_storage_s3 import S3Settings, S3Storage, storage

SECRET = "not-the-secret"


def test_a_wrong_secret_is_named(opened):
    with pytest.raises(AccessDeniedError, match="secret key does not belong"):
        opened(secret_access_key=SECRET)


def test_an_unknown_key_is_named(opened):
    with pytest.raises(AccessDeniedError, match="does not know this access key"):
        opened(access_key_id="unknown")


def test_a_missing_bucket_is_created_only_if_told(opened, namespace):
    with pytest.raises(SettingsError, match="'not-there' does not exist; create it, or set create_bucket"):
        opened(bucket="not-there")
    created = opened(bucket="not-there", create_bucket=True)
    assert created.batch_exists(namespace.keys(["a"])) == [False]


def test_a_key_that_may_not_list_is_told_so(opened, proxy):
    proxy.fault = lambda method, path: (
        faulty.Fault(status=403, code="AccessDenied") if "list-type" in path else None
    )
    with pytest.raises(AccessDeniedError, match="s3:ListBucket"):
        opened(endpoint=proxy.url)


def test_a_wrong_clock_is_named(opened, proxy):
    proxy.fault = lambda *_: faulty.Fault(status=403, code="RequestTimeTooSkewed")
    with pytest.raises(AccessDeniedError, match="clock of this machine is wrong"):
        opened(endpoint=proxy.url)


def test_an_expired_token_is_named(opened, proxy):
    proxy.fault = lambda *_: faulty.Fault(status=400, code="ExpiredToken")
    with pytest.raises(AccessDeniedError, match="session token has expired"):
        opened(endpoint=proxy.url)


def test_a_store_that_is_down_is_unavailable(opened):
    with pytest.raises(UnavailableError):
        opened(endpoint="http://127.0.0.1:1", retries=0)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "bucket"),
        ({"bucket": "b", "endpoint": "example.com"}, "http://"),
        ({"bucket": "b", "access_key_id": "a"}, "go together"),
        ({"bucket": "b", "profile": "p", "anonymous": True}, "one of"),
        ({"bucket": "b", "direct_put": "on", "checksum": "sha256"}, "direct_put"),
        ({"bucket": "b", "express": True}, "--x-s3"),
        ({"bucket": "b--x-s3", "express": True, "endpoint": "http://example.com"}, "no endpoint"),
        ({"bucket": "b", "prefix": "a//b"}, "//"),
        ({"bucket": "b", "ca_file": "/nowhere.pem"}, "ca_file"),
        ({"bucket": "b", "profile": "nobody"}, "no profile 'nobody'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(namespace, table, said):
    with pytest.raises((ValueError, SettingsError), match=said):
        S3Storage(S3Settings(**table), namespace)


@pytest.mark.parametrize("direct_get", ["auto", "on"])
def test_without_presigned_requests_pages_are_read_otherwise(opened, proxy, namespace, tools, direct_get):
    proxy.fault = lambda method, path: (
        faulty.Fault(status=400, code="AuthorizationQueryParametersError") if "X-Amz-Sig" in path else None
    )
    if direct_get == "on":
        with pytest.raises(SettingsError, match="direct_get"):
            opened(endpoint=proxy.url, direct_get="on")
        return
    backend = opened(endpoint=proxy.url)
    said = backend.describe()
    assert said["reads"] == "through obstore: presigned requests: an answer 400"
    assert said["writes"].startswith("through obstore: presigned requests: an answer 400")
    key = namespace.key("page")
    page, read = tools.filled(key, 100_000), tools.empty(100_000)
    assert backend.batch_set_from([key], [page]) == [Status.OK]
    assert backend.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)


def test_presigned_requests_that_stop_working_are_given_up_page_by_page(
    opened, proxy, namespace, tools, caplog
):
    backend = opened(endpoint=proxy.url)
    key = namespace.key("page")
    backend.batch_set_from([key], [tools.filled(key, 100_000)])
    proxy.fault = lambda method, path: faulty.Fault(status=403) if "X-Amz-Sig" in path else None
    for _ in range(3):
        assert backend.batch_get_into([key], [tools.empty(100_000)]) == [Status.OK]
    assert caplog.text.count("presigned") == 1


def test_a_store_that_ignores_conditions_is_noticed(opened, rclone, namespace, tools):
    backend = opened(rclone)
    assert backend.describe()["writes"].endswith("unconditional: the store ignores If-None-Match")
    with pytest.raises(SettingsError, match="ignores If-None-Match"):
        opened(rclone, conditional_put="on")


def test_nothing_of_the_probe_stays(opened, ministack):
    import boto3

    opened(prefix="probe-only")
    keys = {"aws_access_key_id": ministack.key_id, "aws_secret_access_key": ministack.secret}
    s3 = boto3.client("s3", endpoint_url=ministack.endpoint, region_name="us-east-1", **keys)
    assert s3.list_objects_v2(Bucket="pages", Prefix="probe-only/")["KeyCount"] == 0
    assert not s3.list_multipart_uploads(Bucket="pages").get("Uploads")


def test_no_secret_is_ever_shown(ministack, namespace, proxy, tools, caplog):
    caplog.set_level(logging.DEBUG)
    table = ministack.settings(endpoint=proxy.url, checksum="off", retries=0, proxy=None)
    settings = S3Settings(**table)
    shown = [repr(settings), str(settings), settings.model_dump_json()]
    with S3Storage(settings, namespace) as backend:
        keys = namespace.keys(["page"])
        backend.batch_set_from(keys, [tools.filled("page", 100_000)])
        shown += [repr(vars(backend._opened)), str(backend.describe())]
        for code in ("SignatureDoesNotMatch", "InternalError"):
            proxy.fault = lambda *_, code=code: faulty.Fault(status=500, code=code)
            backend.batch_get_into(keys, [tools.empty(100_000)])
            for call in (lambda: backend.get(keys[0]), lambda: backend.batch_exists(keys), backend.clear):
                with pytest.raises(StorageError) as caught:
                    call()
                shown += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    with pytest.raises(AccessDeniedError) as caught:
        S3Storage(
            S3Settings(**{**table, "endpoint": ministack.endpoint, "secret_access_key": SECRET}), namespace
        )
    shown += [str(caught.value), repr(caught.value.__cause__), caplog.text]
    for text in shown:
        assert ministack.secret not in text
        assert SECRET not in text
        assert "X-Amz-Signature" not in text
        assert ministack.key_id not in text


def test_the_backend_says_what_is_in_force(opened):
    said = opened().describe()
    assert said["reads"] == "straight into L2: presigned requests work"
    assert said["writes"] == (
        "straight from L2: presigned requests work; conditional: the store honours If-None-Match"
    )
    assert storage.S3Storage.capabilities.bounded


@pytest.mark.parametrize("key", ["access_key_id", "secret_access_key", "session_token", "proxy"])
def test_no_secret_becomes_an_argument_of_sglang(key):
    from hicache_storage.sglang.launch_args import launch_args

    table = {"bucket": "b", "access_key_id": "a", "secret_access_key": SECRET, key: SECRET}
    with pytest.raises(SettingsError, match=f"HICACHE_S3_{key.upper()}") as caught:
        launch_args("s3", table)
    assert SECRET not in str(caught.value)
    assert launch_args("s3", {"bucket": "b"})
