"""The Celery app: its settings, and that importing it does nothing."""

from __future__ import annotations

import subprocess
import sys

from batchinfer.jobs.dispatch import FINALIZE_TASK, PLAN_TASK, SHARD_TASK, shard_queue
from batchinfer.settings import Settings
from batchinfer_workers.app import celery_settings, create_app


def test_messages_are_permits_and_a_worker_never_gives_up():
    """Threads, acknowledged early, no results kept, reconnecting for ever."""
    conf = create_app(Settings.load(broker_url="redis://localhost:1/0", shards_in_flight=3)).conf
    assert conf.worker_pool == "threads"
    assert conf.worker_concurrency == 5, "three shards, a planner, a finalizer"
    assert conf.task_acks_late is False
    assert conf.result_backend is None
    assert conf.task_ignore_result is True
    assert conf.broker_connection_max_retries is None
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is True
    assert conf.broker_transport_options["visibility_timeout"] >= 3600, "far above the longest shard"
    assert conf.accept_content == ["json"]


def test_both_modes_run_the_same_tasks():
    """Only the broker differs."""
    apps = [create_app(Settings.load(broker_url=url)) for url in ("memory://", "redis://localhost:1/0")]
    for app in apps:
        app.finalize()
        app.loader.import_default_modules()
    names = [{name for name in app.tasks if not name.startswith("celery.")} for app in apps]
    assert names[0] == names[1] == {PLAN_TASK, SHARD_TASK, FINALIZE_TASK}
    embedded, redis = (celery_settings(Settings.load(broker_url=url)) for url in ("memory://", "redis://localhost:1/0"))
    different = {name for name in embedded if embedded[name] != redis[name]}
    assert different == {"broker_url", "broker_transport_options", "worker_enable_remote_control"}


def test_importing_the_app_and_its_tasks_initialises_nothing():
    """No torch, no database connection, no broker connection, no thread before a worker starts."""
    program = """
import sys, threading
import batchinfer_workers.app as module
import batchinfer_workers.tasks
app = module.app
assert app.conf.worker_pool == "threads"
assert not any(name.split(".")[0] in {"torch", "transformers", "psycopg"} for name in sys.modules), "heavy"
assert threading.active_count() == 1
assert app._pool is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_queue_names_are_safe_and_distinct():
    """A model may be a path with any characters; each model has its own queue."""
    models = ["/data/my model.gguf", "org/name", "org/Name", "s3://b/ü"]
    queues = {shard_queue(model) for model in models}
    assert len(queues) == 4
    assert all(queue.removeprefix("batchinfer.model.").isalnum() for queue in queues)
