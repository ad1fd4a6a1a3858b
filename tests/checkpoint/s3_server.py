"""A server in this process that speaks S3, on a free port of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import fsspec


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """Serve an empty bucket; give the variables with which processes find it, which are set here."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a-key-for-tests",
        "AWS_SECRET_ACCESS_KEY": "a-secret-for-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with mock.patch.dict(os.environ, variables):
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
            yield variables
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
