"""Draws the pictures of docs/pictures with chromium: `python docs/site/screenshots.py`.

The first page of the site (`make docs` comes before), the page of a plan, and a report as a
notebook shows it; in light, in dark, and as wide as a phone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import offcompile
from offcompile.ahead.factories import build

ROOT = Path(__file__).resolve().parents[2]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, TALL, PHONE = (1100, 700), (1100, 1130), (390, 780)
#: those that the documentation shows; the others are there to be looked at
SHOWN = ("plan-light", "plan-dark", "notebook-light")
CELL = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>:root {{ color-scheme: light dark }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 16px }}
pre {{ font: 13px/1.4 "DejaVu Sans Mono", monospace; overflow-x: auto }}
.in {{ background: light-dark(#f5f5f5, #22252b); padding: 8px 12px; border-radius: 4px }}</style>
<pre class="in">{source}</pre>{shown}"""
SOURCE = """offcompile.plan(gpt2, **batch, memory="3GiB", hardware="rtx4090", loss=loss)"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, help="write all of them into this folder")
    given = parser.parse_args()
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        print(f"no browser: install one of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    where = given.all or PICTURES
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = written(Path(folder))
        if (SITE / "index.html").exists():
            pages["site"] = SITE / "index.html"
        for name, page in pages.items():
            for look in ("light", "dark", "phone"):
                if given.all or f"{name}-{look}" in SHOWN:
                    draw(found, page, where / f"{name}-{look}.png", look)
    return 0


def written(folder: Path) -> dict[str, Path]:
    """Write the page of a plan, and its report as the output of a cell."""
    built = build("hf:gpt2", 8, 1024, "bfloat16")
    batch = built.inputs(8)
    report = offcompile.plan(
        built.model, **batch, memory="3GiB", hardware="rtx4090", loss=built.loss
    )
    plan, cell = folder / "plan.html", folder / "notebook.html"
    report.save_html(plan)
    cell.write_text(CELL.format(source=SOURCE, shown=report._repr_html_()))
    return {"plan": plan, "notebook": cell}


def draw(browser: str, page: Path, picture: Path, look: str) -> None:
    """Take a picture. A browser's window is wider than a phone, so there the page is in a frame."""
    wide = TALL if picture.name.startswith("plan") else WIDE  # with the lanes
    size = PHONE if look == "phone" else wide
    shown = page
    with tempfile.TemporaryDirectory() as folder:
        if look == "phone":
            shown = Path(folder) / "frame.html"
            shown.write_text(
                "<!doctype html><style>body { margin: 0 } iframe { border: 0 }</style>"
                f'<iframe src="{page.as_uri()}" width="{size[0]}" height="{size[1]}"></iframe>'
            )
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", f"--window-size={size[0]},{size[1]}"]
        options += ["--virtual-time-budget=4000", f"--screenshot={picture}"]
        options += ["--force-dark-mode"] if look == "dark" else []
        subprocess.run(
            [browser, *options, shown.as_uri()], check=True, capture_output=True, timeout=120
        )
    print(f"{picture}  {picture.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    sys.exit(main())
