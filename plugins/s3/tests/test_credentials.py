"""Where keys come from: the standard chain, temporary ones that end during a run, and none at all."""

import configparser
import io
import json
import threading
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hicache_storage import Status
from hicache_storage_s3 import S3Settings, S3Storage

ROLE = "arn:aws:iam::000000000000:role/kv"


def boto(ministack, service, key_id=None, secret=None):
    import boto3

    keys = {
        "aws_access_key_id": key_id or ministack.key_id,
        "aws_secret_access_key": secret or ministack.secret,
    }
    return boto3.client(service, endpoint_url=ministack.endpoint, region_name="us-east-1", **keys)


def unkeyed(ministack, namespace, **more):
    table = ministack.settings(checksum="off", prefix=f"keys-{namespace.epoch}", retries=0, **more)
    del table["access_key_id"], table["secret_access_key"]
    return S3Settings(**table)


def round_trip(storage, namespace, tools, name):
    key = namespace.key(name)
    page, read = tools.filled(key, 500_000), tools.empty(500_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)
    assert storage.batch_exists([key]) == [True]


class Issuer:
    """Hands out session tokens that end at once, by the protocols of containers and of instances."""

    def __init__(self, sts):
        issuer = self
        self.issued = 0

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_PUT(self):
                self.answer(b"metadata token")

            def do_GET(self):
                if self.path.endswith("security-credentials/"):
                    return self.answer(b"role")
                issuer.issued += 1
                return self.answer(issuer.credentials(sts))

            def answer(self, body):
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def credentials(self, sts):
        got = sts.get_session_token()["Credentials"]
        ends = datetime.now(timezone.utc)
        return json.dumps(
            {
                "Code": "Success",
                "Type": "AWS-HMAC",
                "LastUpdated": "2026-01-01T00:00:00Z",
                "RoleArn": ROLE,
                "AccessKeyId": got["AccessKeyId"],
                "SecretAccessKey": got["SecretAccessKey"],
                "Token": got["SessionToken"],
                "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ).encode()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def issuer(ministack):
    issuer = Issuer(boto(ministack, "sts"))
    yield issuer
    issuer.close()


def test_keys_of_the_environment_are_found(ministack, namespace, tools, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ministack.key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ministack.secret)
    with S3Storage(unkeyed(ministack, namespace), namespace) as storage:
        round_trip(storage, namespace, tools, "page")


def test_tokens_of_a_container_are_asked_for_again_when_they_end(
    ministack, issuer, namespace, tools, tmp_path, monkeypatch
):
    (tmp_path / "token").write_text("authorization")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    with S3Storage(unkeyed(ministack, namespace), namespace) as storage:
        issued = issuer.issued
        for turn in range(3):
            round_trip(storage, namespace, tools, f"page-{turn}")
        assert issuer.issued > issued > 0


def test_tokens_of_an_instance_are_asked_for_again_when_they_end(
    ministack, issuer, namespace, tools, monkeypatch
):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", issuer.url)
    with S3Storage(unkeyed(ministack, namespace), namespace) as storage:
        issued = issuer.issued
        for turn in range(3):
            round_trip(storage, namespace, tools, f"page-{turn}")
        assert issuer.issued > issued > 0


def test_a_web_identity_is_exchanged_for_keys(
    ministack, https, authority, namespace, tools, tmp_path, monkeypatch
):
    trust = {"Effect": "Allow", "Principal": "*", "Action": "sts:AssumeRoleWithWebIdentity"}
    allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    root = boto(ministack, "iam", "root-id", "root-secret")
    root.create_role(RoleName="kv", AssumeRolePolicyDocument=policy(trust))
    root.put_role_policy(RoleName="kv", PolicyName="pages", PolicyDocument=policy(allowed))
    (tmp_path / "identity").write_text("eyJhbGciOiJub25lIn0.eyJzdWIiOiJwb2QifQ.x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", https.url)  # plain HTTP is refused
    settings = unkeyed(ministack, namespace, ca_file=authority / "ca.pem")
    with S3Storage(settings, namespace) as storage:
        round_trip(storage, namespace, tools, "page")
    assert https.requests["POST"]


def policy(statement):
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def test_a_bucket_open_to_everybody_needs_no_key(ministack, namespace, tools):
    s3 = boto(ministack, "s3")
    s3.create_bucket(Bucket="open")
    s3.delete_public_access_block(Bucket="open")
    names = ["arn:aws:s3:::open", "arn:aws:s3:::open/*"]
    anybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": names}
    s3.put_bucket_policy(Bucket="open", Policy=policy(anybody))
    settings = unkeyed(ministack, namespace).model_copy(update={"bucket": "open", "anonymous": True})
    with S3Storage(settings, namespace) as storage:
        round_trip(storage, namespace, tools, "page")
        assert storage.describe()["reads"] == "through obstore: presigned requests: no key to sign with"


def test_the_tokens_of_a_profile_may_change_during_a_run(ministack, namespace, tmp_path, monkeypatch, tools):
    sts = boto(ministack, "sts")
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setattr("hicache_storage_s3.credentials.REREAD_SECONDS", 0.0)

    def rotate():
        got = sts.get_session_token()["Credentials"]
        parser = configparser.RawConfigParser()
        parser["kv"] = {
            "aws_access_key_id": got["AccessKeyId"],
            "aws_secret_access_key": got["SecretAccessKey"],
            "aws_session_token": got["SessionToken"],
        }
        text = io.StringIO()
        parser.write(text)
        path.write_text(text.getvalue())

    rotate()
    with S3Storage(unkeyed(ministack, namespace, profile="kv"), namespace) as backend:
        page, key = tools.filled("page", 100_000), namespace.key("page")
        assert backend.batch_set_from([key], [page]) == [Status.OK]
        path.write_text("[kv]\naws_access_key_id = gone\naws_secret_access_key = gone\n")
        assert backend.batch_get_into([key], [tools.empty(100_000)]) != [Status.OK]
        rotate()
        assert backend.batch_get_into([key], [tools.empty(100_000)]) == [Status.OK]
