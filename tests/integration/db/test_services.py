"""The services that tests stand on."""

from __future__ import annotations

import boto3
import redis
from sqlalchemy import text

from batchinfer.db.session import create_db_engine


def test_redis_is_empty_and_answers(redis_url):
    client = redis.Redis.from_url(redis_url)
    assert client.dbsize() == 0
    client.set("key", "value")
    assert client.get("key") == b"value"
    client.close()


def test_postgres_survives_a_restart_and_pooled_connections_notice(postgres, postgresql_url):
    """A pooled connection that died with the server is replaced before use."""
    engine = create_db_engine(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("COMMENT ON TABLE jobs IS 'kept'"))
    postgres.restart()
    with engine.begin() as connection:
        assert connection.execute(text("SELECT obj_description('jobs'::regclass)")).scalar_one() == "kept"
    engine.dispose()


def test_s3_starts_without_buckets(s3_endpoint):
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    assert client.list_buckets()["Buckets"] == []
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="k", Body=b"v")
    assert client.get_object(Bucket="bucket", Key="k")["Body"].read() == b"v"
    client.close()
