"""Pages that are made from code, and commands that pages name."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.config.document import document

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_recipe_keys_is_what_the_code_says() -> None:
    assert (ROOT / "docs/recipes.md").read_text() == document(), (
        "run: python -m megarl.config.document > docs/recipes.md"
    )


def test_every_path_that_a_page_names_exists() -> None:
    pattern = re.compile(r"\b(?:docs|launch|slurm|tests|tools|megarl|cpu_development)/[\w./-]*\w")
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        missing = {path for path in pattern.findall(page.read_text()) if not (ROOT / path).exists()}
        assert not missing, f"{page.name} names {sorted(missing)}"
