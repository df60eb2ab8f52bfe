"""The documentation site has every page, and no link in it leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
MENU = ROOT / "docs" / "site" / "mkdocs.yml"
#: pages that the build writes
WRITTEN = {"api.md", "gallery/README.md", "benchmarks/results/README.md"}
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", MENU.with_name("build.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SOURCE", tmp_path)
    return module


def test_the_menu_lists_every_page_of_docs_and_nothing_else() -> None:
    menu = MENU.read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.md)$", menu, re.MULTILINE)
    assert len(set(listed)) == len(listed)
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")}
    other = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", *WRITTEN}
    assert set(listed) == there | other


def test_links_of_all_pages_lead_somewhere(build: ModuleType, tmp_path: Path) -> None:
    for page in build.pages():
        build.copy(page)
    for name in WRITTEN:
        if not (tmp_path / name).exists():
            build.write(name, "# Written by the build\n")
    pages = sorted(tmp_path.rglob("*.md"))
    assert len(pages) > 50
    checked = 0
    for page in pages:
        for _, target, _ in build.LINK.findall(FENCED.sub("", page.read_text())):
            checked += 1
            assert (page.parent / unquote(target)).is_file(), (
                f"{page.relative_to(tmp_path)}: {target}"
            )
    assert checked > 200


def test_the_api_page_names_everything_public(build: ModuleType) -> None:
    text = build.api()
    for name in ("fit", "plan", "max_batch", "reports", "save", "PlanReport"):
        assert re.search(rf"^::: offcompile\.[a-z_.]+\.{name}$", text, re.MULTILINE)
    for name in build.OPTIMIZERS:
        assert f"::: offcompile.optim.{name}" in text
