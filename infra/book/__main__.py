"""Builds the book: `make book`. The site lies in .book/site, and needs no network to be read."""

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from infra import packages
from infra.book import pages
from infra.lessons.source import discover
from infra.obstacles import alone, say, stop

ROOT = packages.ROOT
BOOK = ROOT / ".book"
REQUIREMENTS = ROOT / "infra" / "book" / "requirements.txt"


def main() -> None:
    """Make the tools' environment where it is not there yet, the pages, and the site."""
    python = BOOK / "environment" / "bin" / "python"
    began = time.monotonic()
    with alone(BOOK.with_name(".book.lock")):
        stamp = BOOK / "requirements.stamp"
        if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
            build_environment(python)
            stamp.write_text(REQUIREMENTS.read_text())
        source, site = BOOK / "source", BOOK / "site"
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(site, ignore_errors=True)
        source.mkdir(parents=True)
        num_pages = pages.write_all(ROOT, discover(ROOT), source)
        command = [str(python), "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(REQUIREMENTS.parent)]
        if subprocess.run([*command, str(source), str(site)], cwd=ROOT).returncode:
            stop("The book could not be built; the lines above say why.")
    print(f"{num_pages} pages in {time.monotonic() - began:.0f} s: {site / 'index.html'}")


def build_environment(python: Path) -> None:
    """An environment with Sphinx, which sees the course's own packages besides."""
    say("Making .book, with Sphinx, beside the course's own environment")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parents[1])]).returncode:
        stop(f"{sys.executable} can not make a virtual environment; the lines above say why.")
    places = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    course = Path(places.stdout.strip()) / "course.pth"
    course.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    packages.install_or_stop(python, python.parents[1], "-r", str(REQUIREMENTS))


if __name__ == "__main__":
    main()
