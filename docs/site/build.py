"""Builds the documentation site into build/site: `make docs`.

The pages are those of the repository, in its folders, so that every link works in both places. A
link that leads nowhere ends the build. Added to them: the public API from its docstrings, the
results of the benchmarks, and a gallery of plans, each with its page as `--html` writes it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import offcompile

ROOT = Path(__file__).resolve().parents[2]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
CONFIG = Path(__file__).with_name("mkdocs.yml")
#: folders of pages that the menu does not list one by one
RESULTS = "benchmarks/results"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", f"{RESULTS}/*.md")
#: [text](target), but not an image of another site, an anchor, or an address
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
#: beginnings of the lines that say why a build ended
TOLD = ("WARNING", "ERROR", "Aborted", "Traceback")
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Muon")
#: what `offcompile fit` is asked for each plan of the gallery
GALLERY = {
    "GPT-2 Medium in 4 GiB of an RTX 4090": "hf:gpt2-medium --hardware rtx4090 --batch 8"
    " --length 1024 --memory 4GiB",
    "GPT 1.3B with AdamW on an RTX 4090": "hf:gpt-1.3b --hardware rtx4090 --batch 8 --length 1024"
    " --memory 12GiB --optimizer adamw",
    "Llama 3.1 8B with AdamW on an RTX 4090": "hf:llama-3.1-8b --hardware rtx4090 --batch 1"
    " --length 2048 --memory 23GiB --optimizer adamw",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-gallery", action="store_true", help="leave out the plans")
    given = parser.parse_args()
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in pages():
        copy(page)
    write("extra.css", Path(__file__).with_name("extra.css").read_text())
    write("api.md", api())
    write(f"{RESULTS}/README.md", folder(ROOT / RESULTS, "Measured"))
    write("gallery/README.md", gallery([] if given.no_gallery else list(GALLERY)))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG)]
    quietly = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=quietly)
    for line in done.stderr.splitlines():
        if line.startswith(TOLD):
            print(line)
    if done.returncode == 0:
        print(f"{SITE / 'index.html'} is the first page")
    return done.returncode


def pages() -> Iterator[Path]:
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))


def copy(page: Path) -> None:
    """Copy a page, and the files that it links to; link to a folder by its list of files."""
    write(
        str(page.relative_to(ROOT)),
        LINK.sub(lambda found: found[1] + linked(page, found[2]) + found[3], page.read_text()),
    )


def linked(page: Path, target: str) -> str:
    """The target as the site has it, after copying it there."""
    path = (page.parent / target).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return target  # the build says so
    place = SOURCE / path.relative_to(ROOT)
    if path.is_dir():
        if not (place / "README.md").exists():
            write(str(place.relative_to(SOURCE) / "README.md"), folder(path, path.name))
        return f"{target.rstrip('/')}/README.md"
    if path.suffix != ".md":
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return target


def folder(path: Path, title: str) -> str:
    """A page that lists the files of a folder."""
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name != "README.md")
    for file in files:
        linked(path / "README.md", file.name)
    return f"# {title}\n\n" + "".join(f"- [{file.name}]({file.name})\n" for file in files)


def api() -> str:
    """A page of everything public, from its docstrings."""
    later = offcompile._LATER
    lines = ["# API", "", "Everything that `import offcompile` offers."]
    for name in offcompile.__all__:
        if name in later:
            lines += ["", f"::: {later[name]}.{name}"]
    lines += ["", "## Optimizers", ""]
    lines += [f"::: offcompile.optim.{name}\n" for name in (*OPTIMIZERS, "offload")]
    return "\n".join([*lines, "## Errors", "", "::: offcompile.ir.errors", ""])


def gallery(titles: list[str]) -> str:
    """Plans ahead of hardware: the command, its answer, and its page."""
    lines = [
        "# Gallery of plans",
        "",
        "Each plan was made on a CPU, for a card that was not there.",
    ]
    for number, title in enumerate(titles):
        name, asked = f"plan_{number}.html", GALLERY[title].split()
        page = SOURCE / "gallery" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        command = ["fit", *asked, "--quick"]
        told = subprocess.run(
            [sys.executable, "-m", "offcompile", *command, "--html", str(page)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        lines += ["", f"## {title}", "", f"[Open its page]({name})", ""]
        lines += ["```text", f"$ offcompile {' '.join(command)}", "", told.strip(), "```"]
    return "\n".join(lines) + "\n"


def write(place: str, text: str) -> None:
    path = SOURCE / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
