"""The import rules of docs/architecture.md, read from the source: who may import whom, and what never loads early."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "batchinfer": ROOT / "batchinfer",
    "batchinfer_kernels": ROOT / "kernels" / "batchinfer_kernels",
    "batchinfer_workers": ROOT / "workers" / "batchinfer_workers",
}

BASE = {
    "batchinfer.types",
    "batchinfer.errors",
    "batchinfer.sampling_params",
    "batchinfer.chat_params",
    "batchinfer.guided",
    "batchinfer.money",
    "batchinfer.log_context",
    "batchinfer.tracing",
    "batchinfer.tasks",
    "batchinfer.model_kind",
    "batchinfer.adapter_config",
    "batchinfer.stages",
    "batchinfer.template_budget",
    "batchinfer.template_sandbox",
    "batchinfer.chat_template",
}
# layer -> the layers it may import besides itself and BASE
ALLOWED = {
    "batchinfer.types": {"batchinfer.sampling_params"},
    "batchinfer.errors": {"batchinfer.types"},
    "batchinfer.sampling_params": {"batchinfer.chat_params", "batchinfer.guided"},
    "batchinfer.chat_params": set(),
    "batchinfer.guided": set(),
    "batchinfer.money": set(),
    "batchinfer.log_context": set(),
    "batchinfer.tracing": set(),
    "batchinfer.tasks": set(),
    "batchinfer.model_kind": {"batchinfer.tasks"},
    "batchinfer.adapter_config": set(),
    "batchinfer.stages": {"batchinfer.sampling_params", "batchinfer.chat_params", "batchinfer.guided"},
    "batchinfer.template_budget": set(),
    "batchinfer.template_sandbox": {"batchinfer.template_budget"},
    "batchinfer.chat_template": {"batchinfer.template_budget", "batchinfer.template_sandbox"},
    "batchinfer.settings": set(),
    "batchinfer_kernels": set(),
    "batchinfer.models": {"batchinfer_kernels", "batchinfer.engine.config"},
    "batchinfer.engine": {"batchinfer.models", "batchinfer_kernels"},
    "batchinfer.db": set(),
    "batchinfer.dataset": set(),
    "batchinfer.jobs": {"batchinfer.db", "batchinfer.dataset"},
    "batchinfer_workers": {
        "batchinfer.jobs", "batchinfer.db", "batchinfer.dataset", "batchinfer.engine", "batchinfer.settings", "batchinfer",
    },
    "batchinfer.api": {"batchinfer.jobs", "batchinfer.db", "batchinfer.dataset", "batchinfer.settings", "batchinfer"},
    "batchinfer.cli": {
        "batchinfer.jobs", "batchinfer.db", "batchinfer.dataset", "batchinfer.settings", "batchinfer.api",
        "batchinfer.client", "batchinfer_workers", "batchinfer.models", "batchinfer.engine", "batchinfer_kernels", "batchinfer",
    },
    "batchinfer.client": {"batchinfer.jobs", "batchinfer.dataset", "batchinfer"},
    "batchinfer": {"batchinfer.jobs", "batchinfer.engine", "batchinfer.client"},
}  # fmt: skip
HEAVY = {"torch", "transformers", "triton"}
LIGHT_LAYERS = (
    "batchinfer.cli", "batchinfer.api", "batchinfer.client", "batchinfer.jobs", "batchinfer.db", "batchinfer.dataset", "batchinfer.settings",
    "batchinfer_workers", *sorted(BASE), "batchinfer",
)  # fmt: skip
SETTINGS_READERS = ("batchinfer.cli", "batchinfer.api", "batchinfer_workers", "batchinfer.settings")


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join((package, *parts)).removesuffix(".__init__"), path))
    return found


def layer_of(module: str) -> str:
    """The longest known layer that the module lies in."""
    fits = [layer for layer in ALLOWED if module == layer or module.startswith(layer + ".")]
    return max(fits, key=len)


def imports(path: Path, *, top_level_only: bool) -> list[tuple[int, str]]:
    """Every imported module with its line; type-checking blocks are left out, since they never run."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and top_level_only:
                continue
            if isinstance(child, ast.Import):
                found.extend((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno} uses a relative import"
                found.append((child.lineno, child.module or ""))
                # `from batchinfer.engine import config` names a module as well
                found.extend((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in PACKAGES


def is_allowed(source: str, target: str) -> bool:
    layer = layer_of(source)
    goal = layer_of(target)
    if goal == layer or goal in BASE:
        return True
    return any(target == name or (name != "batchinfer" and target.startswith(name + ".")) for name in ALLOWED[layer])


def module_names() -> set[str]:
    return {name for name, _ in modules()}


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_a_layer_imports_only_what_lies_below_it(module, path):
    known = module_names()
    for line, target in imports(path, top_level_only=False):
        if is_ours(target) and target in known:
            assert is_allowed(module, target), f"{path}:{line}: {module} may not import {target}"


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_torch_never_loads_with_the_doors_or_the_ledger(module, path):
    if not any(module == layer or (layer != "batchinfer" and module.startswith(layer + ".")) for layer in LIGHT_LAYERS):
        return
    for line, target in imports(path, top_level_only=True):
        assert target.split(".")[0] not in HEAVY, f"{path}:{line}: {module} loads {target} when it is imported"
        assert not target.startswith(("batchinfer.models", "batchinfer_kernels")), (
            f"{path}:{line}: loads {target} early"
        )


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_only_entry_points_read_settings(module, path):
    if module.startswith(SETTINGS_READERS):
        return
    for line, target in imports(path, top_level_only=False):
        assert not target.startswith("batchinfer.settings"), f"{path}:{line}: {module} reads settings"


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_nothing_is_pickled_and_no_remote_code_is_trusted(module, path):
    for line, target in imports(path, top_level_only=False):
        assert target.split(".")[0] not in {"pickle", "cloudpickle", "dill", "joblib", "shelve"}, f"{path}:{line}"
    assert "trust_remote_code=True" not in path.read_text(), path


def test_a_forbidden_import_is_seen():
    """The rule itself can fail: these pairs must be refused."""
    assert not is_allowed("batchinfer.engine.engine", "batchinfer.jobs.ledger")
    assert not is_allowed("batchinfer.dataset.source", "batchinfer.db.tables")
    assert not is_allowed("batchinfer.db.tables", "batchinfer.dataset.source")
    assert not is_allowed("batchinfer.jobs.ledger", "batchinfer_workers.tasks")
    assert not is_allowed("batchinfer.api.app", "batchinfer_workers.tasks")
    assert not is_allowed("batchinfer.models.load", "batchinfer.engine.scheduler")
    assert is_allowed("batchinfer.jobs.ledger", "batchinfer.db.tables")
