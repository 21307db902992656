"""The page of models says what models do."""

from batchinfer.models.fused.families import FAMILIES
from tests.engine.models_page import NAMES, PAGE, REFUSED, page


def test_the_page_is_what_small_models_of_each_family_do():
    assert PAGE.read_text() == page(), "run: python -m tests.engine.models_page"


def test_every_family_with_fused_layers_is_on_the_page():
    text = PAGE.read_text()
    assert set(NAMES) >= FAMILIES
    for family in FAMILIES:
        (row,) = [line for line in text.splitlines() if f"| `{family}` |" in line]
        assert "fused layers" in row
        assert "| yes |" in row
    assert all(f"`{family}`" in text for family in REFUSED)
