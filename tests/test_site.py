"""The site of the documentation: it builds without a warning and works without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a page that the navigation lacks, a broken link or anchor is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation_of_the_first(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    navigation = set(re.findall(r'<a href="([\w./-]+)" class="md-nav__link', home)) | {"index.html"}
    assert pages == sources
    assert pages <= navigation


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]* src="([^"]+)"', text)
        fetched += re.findall(r'<link[^>]* href="([^"]+)"', text)
        assert [address for address in fetched if re.match(r"(\w+:)?//", address)] == [], page.name


def test_tables_and_code_get_the_styles_of_the_site(site: Path) -> None:
    page = (site / "reference/recipe.html").read_text("utf-8")
    assert "site.css" in page
    assert "site.js" in page
    chat = (site / "guides/chat.html").read_text("utf-8")
    assert '<span class="n">format</span>' in chat
    assert 'data-md-color-scheme="slate"' in chat
