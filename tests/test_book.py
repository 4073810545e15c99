"""The book, where it has been built (`make book`): read in a real browser, without a network."""

import html.parser
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from infra.book import pages
from infra.lessons.source import discover

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".book" / "site"
LESSONS = discover(ROOT)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

OF_THE_THEME = ("Got invalid theme mode: . Resetting to auto.", "[PST]: ")
"""What the theme says of itself on every page."""

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.slug for lesson in LESSONS])
built = pytest.mark.skipif(not SITE.exists(), reason="the book is not built here: make book")


class Links(html.parser.HTMLParser):
    """What a page leads to and shows."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attributes if name in ("href", "src") and value]


@each_lesson
def test_an_answer_is_folded_below_its_stub(lesson: pages.Lesson) -> None:
    cells = pages.page_of(lesson).cells
    for stub, answer in itertools.pairwise(cells):
        if "exercise" in answer.metadata:
            assert stub.id.startswith("stub-")
            assert "hide-input" in answer.metadata["tags"]
            assert answer.source not in stub.source
    assert sum("exercise" in cell.metadata for cell in cells) == len(lesson.exercises)
    assert not any(cell.id == "colab" for cell in cells)
    nbformat.validate(nbformat.from_dict({**pages.page_of(lesson)}))


def test_links_of_the_repository_lead_to_pages_of_the_book() -> None:
    text = pages.in_the_book((ROOT / "README.md").read_text(), ROOT, LESSONS)
    assert "](lessons/data_parallel.ipynb)" in text
    assert "](using.md)" in text
    assert "](using.md#bytes-asked-for-and-bytes-that-travel)" in text
    assert "](infra/" not in text
    assert "<!--" not in text


@built
def test_every_link_inside_the_book_leads_somewhere() -> None:
    for page in (each for each in SITE.rglob("*.html") if "_static" not in each.parts):
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        for target in links.targets:
            parts = urlsplit(target)
            if not parts.scheme and not parts.netloc and parts.path:
                assert (page.parent / unquote(parts.path)).exists(), f"{page.relative_to(SITE)}: {target}"


@built
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize("page", ["index", *(f"lessons/{lesson.slug}" for lesson in LESSONS)])
def test_a_browser_shows_it_without_an_error_and_without_a_network(page: str) -> None:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{SITE / page}.html"], capture_output=True, text=True, timeout=120
    )
    told = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    assert [line for line in told if not any(known in line for known in OF_THE_THEME)] == []
    if page != "index":
        assert "mjx-container" in done.stdout
        text = re.sub(r"<(script|style|pre).*?</\1>", "", done.stdout, flags=re.DOTALL)
        assert "\\frac" not in re.sub(r"<[^>]+>", "", text)
