"""Whole folders in the object store, for what other programs read as files: an exported Hugging Face directory.

Payloads of a run never go this way; they are single objects (`rl360.store.object_store`).
"""

from __future__ import annotations

from pathlib import Path

import botocore.exceptions

from rl360.config.services import Services
from rl360.errors import BadInput, StoreUnavailable

TIMEOUT_S = 300.0


def split_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://bucket/prefix`, else `BadInput`."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket or not prefix.strip("/"):
        raise BadInput(f"{url!r} is not a folder in an object store; write s3://bucket/prefix")
    return bucket, prefix.strip("/")


def upload_folder(services: Services, folder: Path, url: str) -> list[str]:
    """Copy every file under `folder` to `url`, a prefix that holds nothing yet; returns the object names."""
    import s3fs  # half a second, which a trainer that exports nothing does without

    bucket, prefix = split_url(url)
    secrets = services.secrets()
    store = s3fs.S3FileSystem(
        key=secrets.s3_access_key,
        secret=secrets.s3_secret_key,
        endpoint_url=services.s3_endpoint,
        client_kwargs={"region_name": "us-east-1"},
        config_kwargs={"connect_timeout": 5, "read_timeout": TIMEOUT_S, "s3": {"addressing_style": "path"}},
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    target = f"{bucket}/{prefix}"
    try:
        if store.find(target):
            raise BadInput(f"{url} holds objects already; export to a new prefix")
        store.put(f"{folder}/", f"{target}/", recursive=True)
        return [str(name) for name in store.find(target)]
    except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise StoreUnavailable(f"cannot copy {folder} to {url}: {' '.join(str(error).split())[:200]}") from None
