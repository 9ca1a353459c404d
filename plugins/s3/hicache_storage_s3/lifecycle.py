"""Lifecycle rules: the service removes old pages by itself."""

from __future__ import annotations

from typing import Any

from hicache_storage.errors import AccessDeniedError, SettingsError
from hicache_storage_s3.settings import S3Settings


def rules(settings: S3Settings, days: int) -> list[dict[str, Any]]:
    """What ``PutBucketLifecycleConfiguration`` takes: expiry of pages, and of uploads left half-way."""
    prefix = f"{settings.prefix}/" if settings.prefix else ""
    return [
        {
            "ID": _name(settings),
            "Status": "Enabled",
            "Filter": {"Prefix": prefix},
            "Expiration": {"Days": days},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
    ]


def apply_rules(settings: S3Settings, wanted: list[dict[str, Any]]) -> int:
    """Put the rules into force in place of ours from before; how many others stay.

    Raises SettingsError when boto3 is not installed, or AccessDeniedError when the service refuses.
    """
    try:
        import boto3  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import botocore.config  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import botocore.exceptions  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise SettingsError(
            "applying takes boto3: pip install 'hicache-storage-s3[admin]', or give what is printed to "
            f"aws s3api put-bucket-lifecycle-configuration --bucket {settings.bucket}"
        ) from None
    secret, token = settings.secret_access_key, settings.session_token
    session = boto3.Session(profile_name=settings.profile or None)
    client = session.client(
        "s3",
        endpoint_url=settings.endpoint or None,
        region_name=settings.region or None,
        aws_access_key_id=settings.access_key_id.get_secret_value() if settings.access_key_id else None,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        aws_session_token=token.get_secret_value() if token else None,
        verify=str(settings.ca_file) if settings.ca_file else None,
        config=botocore.config.Config(s3={"addressing_style": "path" if settings.path_style else "virtual"}),
    )
    try:
        try:
            present = client.get_bucket_lifecycle_configuration(Bucket=settings.bucket).get("Rules", [])
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
                raise
            present = []
        others = [rule for rule in present if rule.get("ID") != _name(settings)]
        client.put_bucket_lifecycle_configuration(
            Bucket=settings.bucket, LifecycleConfiguration={"Rules": [*others, *wanted]}
        )
    except botocore.exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        raise AccessDeniedError(f"the service refuses the lifecycle rules: {code}") from None
    except botocore.exceptions.BotoCoreError as error:
        raise SettingsError(f"the lifecycle rules could not be applied: {type(error).__name__}") from None
    return len(others)


def _name(settings: S3Settings) -> str:
    return f"hicache {settings.prefix}".strip()
