"""Credentials from a profile of the shared credentials file.

obstore knows the rest of the standard chain (environment, web identity, container, instance
metadata) but not profiles. The file is read again before its credentials can be too old, so
whoever rotates session tokens there needs no restart.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage.errors import SettingsError

if TYPE_CHECKING:
    from obstore.store import S3Credential

REREAD_SECONDS = 300.0
"""obstore asks again some time before what it was given expires."""

_COMMAND_SECONDS = 10.0


class Profile:
    """Called by obstore whenever it needs credentials that are still good."""

    def __init__(self, name: str) -> None:
        """Raises SettingsError when the profile is not there or holds no keys."""
        self._name = name
        self._reread = timedelta(seconds=REREAD_SECONDS)
        self()

    def __call__(self) -> S3Credential:
        section = self._section()
        if "credential_process" in section:
            return self._from_command(section["credential_process"])
        try:
            key, secret = section["aws_access_key_id"], section["aws_secret_access_key"]
        except KeyError:
            raise SettingsError(
                f"profile {self._name!r} holds no keys; for roles and single sign-on, let the AWS command "
                "line put temporary keys there or name it as credential_process"
            ) from None
        expires = datetime.now(timezone.utc) + self._reread
        token = section.get("aws_session_token")
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}

    def _section(self) -> dict[str, str]:
        found: dict[str, str] = {}
        files = (
            (os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), f"profile {self._name}"),
            (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), self._name),
        )
        for path, section in files:
            parser = configparser.RawConfigParser()
            try:
                parser.read(Path(path).expanduser())
            except configparser.Error:
                raise SettingsError(f"{path} is not a credentials file") from None
            for name in (section, self._name):
                if parser.has_section(name):
                    found.update(parser.items(name))
                    break
        if not found:
            raise SettingsError(f"there is no profile {self._name!r} in the shared credentials file")
        return found

    def _from_command(self, command: str) -> S3Credential:
        try:
            done = subprocess.run(  # noqa: S603 (the operator's own configuration names it)
                shlex.split(command), capture_output=True, check=True, timeout=_COMMAND_SECONDS
            )
            answer = json.loads(done.stdout)
            expires = answer.get("Expiration")
            return {
                "access_key_id": answer["AccessKeyId"],
                "secret_access_key": answer["SecretAccessKey"],
                "token": answer.get("SessionToken"),
                "expires_at": datetime.fromisoformat(expires.replace("Z", "+00:00")) if expires else None,
            }
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, AttributeError):
            raise SettingsError(
                f"credential_process of profile {self._name!r} gives no credentials"
            ) from None
