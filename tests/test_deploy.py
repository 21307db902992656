"""docker-compose.yml, Dockerfile and Makefile name only what exists: no engine to run them is needed to see that."""

import re
import tomllib
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import click
import pytest
import yaml
from fastapi.testclient import TestClient

from batchinfer.api.access import noun_of
from batchinfer.api.app import create_app
from batchinfer.cli.main import cli
from batchinfer.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"].startswith("batchinfer")}


def options_of(command):
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}


def find_command(words):
    """The click command that the words name, and the words that remain."""
    command, rest = cli, list(words)
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"batchinfer has no command {name!r}"
        command = found
    return command, rest


def assert_runs(words):
    command, rest = find_command(words)
    assert not isinstance(command, click.Group), f"{words}: a command is missing"
    for word in rest:
        if word.startswith("-"):
            assert word in options_of(command), f"{command.name} has no option {word}"


def test_the_services_that_a_team_needs_are_there():
    assert {"postgres", "redis", "api", "worker", "ticker", "minio", "prometheus"} <= set(COMPOSE["services"])
    assert COMPOSE["services"]["minio"]["profiles"] == ["s3"]
    assert COMPOSE["services"]["prometheus"]["profiles"] == ["metrics"]
    device = COMPOSE["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


@pytest.mark.parametrize("name", OURS)
def test_each_command_and_option_exists(name):
    assert_runs(OURS[name]["command"])


@pytest.mark.parametrize("name", OURS)
def test_each_variable_is_a_setting(name):
    variables = {key for key in OURS[name]["environment"] if key.startswith(ENV_PREFIX)}
    assert variables
    assert variables <= {ENV_PREFIX + field.upper() for field in Settings.model_fields}


def test_the_settings_in_compose_are_valid(monkeypatch):
    """The values themselves load, with the variables filled in."""
    for key, value in OURS["worker"]["environment"].items():
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
        monkeypatch.setenv(key, re.sub(r"\$\{\w+:\?[^}]*\}", "secret", text))
    settings = Settings.load()
    assert settings.sqlalchemy_url == "postgresql://batchinfer:secret@postgres:5432/batchinfer"
    assert not settings.is_embedded


def test_dependencies_volumes_and_conditions_fit():
    services = COMPOSE["services"]
    for name, service in services.items():
        for needed, condition in service.get("depends_on", {}).items():
            assert needed in services, f"{name} depends on {needed}"
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[needed], f"{name} waits for {needed}, which has no health check"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), f"{name}: {source}"


def test_the_api_answers_where_its_health_check_asks(tmp_path):
    command = OURS["api"]["command"]
    port = command[command.index("--port") + 1]
    assert OURS["api"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    check = " ".join(OURS["api"]["healthcheck"]["test"])
    path = re.search(rf"http://127\.0\.0\.1:{port}(/\w+)", check)[1]
    app = create_app(Settings.load(home=tmp_path))
    assert path in app.openapi()["paths"]


def test_the_workers_health_check_is_a_command():
    check = OURS["worker"]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "batchinfer"]
    assert_runs(check[2:])


def test_prometheus_scrapes_a_route_that_exists(tmp_path):
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "batchinfer"]
    assert job["static_configs"][0]["targets"] == ["api:8000"]
    routes = set(create_app(Settings.load(home=tmp_path)).openapi()["paths"])
    assert job.get("metrics_path", "/metrics") in routes


def test_the_image_runs_the_program_that_the_package_installs():
    text = (ROOT / "Dockerfile").read_text()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry = re.search(r'^ENTRYPOINT \["(\w+)"\]', text, re.MULTILINE)[1]
    assert entry in scripts
    stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE)
    assert stages == ["build", "runtime"]
    assert all(OURS[name]["build"]["target"] in stages for name in OURS)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split()), source
    assert f"torch=={pinned_torch()}" in text


def pinned_torch():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(name.split("==")[1] for name in dependencies if name.startswith("torch=="))


def test_makefile_and_package_pin_the_same_torch():
    assert f"torch=={pinned_torch()}" in (ROOT / "Makefile").read_text()


def test_autoscalers_ask_for_what_the_api_answers(tmp_path):
    """KEDA's URL and field are those of the API's own document, its key's scope is the route's noun; the metric exists."""
    parts = list(yaml.safe_load_all((ROOT / "deploy" / "keda.yaml").read_text()))
    assert [part["kind"] for part in parts] == ["Secret", "TriggerAuthentication", "ScaledObject", "Deployment"]
    assert parts[2]["spec"]["scaleTargetRef"]["name"] == parts[3]["metadata"]["name"]
    (container,) = parts[3]["spec"]["template"]["spec"]["containers"]
    assert_runs(container["args"])
    assert {one["name"] for one in container["env"]} <= {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    (trigger,) = parts[2]["spec"]["triggers"]
    address = urlsplit(trigger["metadata"]["url"])
    assert noun_of(address.path) == "queue"
    document = create_app(Settings.load(home=tmp_path)).openapi()
    operation = document["paths"][address.path]["get"]
    assert set(parse_qs(address.query)) <= {parameter["name"] for parameter in operation["parameters"]}
    field = trigger["metadata"]["valueLocation"]
    assert document["components"]["schemas"]["QueueView"]["properties"][field]["type"] == "integer"
    hpa = yaml.safe_load((ROOT / "deploy" / "hpa.yaml").read_text())
    (metric,) = hpa["spec"]["metrics"]
    with TestClient(create_app(Settings.load(home=tmp_path)), base_url="http://localhost") as client:
        assert f"# TYPE {metric['external']['metric']['name']} gauge" in client.get("/metrics").text
