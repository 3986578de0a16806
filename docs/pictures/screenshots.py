"""The book's pictures of a report: `python docs/pictures/screenshots.py` writes them beside this file.

It trains six tiny models in `runs/pictures`, a few minutes on one core; models that are there are taken as they are.
It needs Chromium: the program `chromium`, `chromium-browser` or `google-chrome`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TABLE = "mixhead/table1-vanilla --scale tiny --rows plain,b --seeds 3 data.tokens=byte train.tokens=600000"
SIZES = (
    "model.hidden_size=32 model.num_hidden_layers=2 model.num_attention_heads=8 model.head_dim=4 "
    "model.intermediate_size=64 train.learning_rate=0.005 eval.every_steps=40 eval.max_tokens=20000"
)
# width and height on the screen, pixels for each of its points, preferred scheme
PICTURES = {
    "report_light": (1280, 2080, 1, "light"),
    "report_dark": (1280, 2080, 1, "dark"),
    "report_phone": (390, 844, 2, "light"),
}
OFFLINE = "--no-first-run --disable-background-networking --disable-component-update --disable-sync"


def browser() -> str:
    """Find Chromium; the script ends if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        sys.exit(
            f"The screenshots need Chromium, and none of {', '.join(BROWSERS)} is on the PATH (Debian: apt install chromium)."
        )
    return found


def make_report(folder: Path) -> Path:
    """Write the report of six tiny runs, with their spectra."""
    fullrank = [sys.executable, "-m", "fullrank"]
    subprocess.run(
        [*fullrank, "reproduce", *TABLE.split(), *SIZES.split(), "--quiet", "--out", str(folder)], check=True
    )
    runs = [str(folder / f"{row}-tiny-seed{seed}") for row in ("plain", "b") for seed in (1, 2, 3)]
    measured = [run for run in runs if (Path(run) / "analysis" / "spectrum.json").is_file()]
    if len(measured) < len(runs):
        subprocess.run([*fullrank, "analyze", "spectrum", *runs, "--texts", "4"], check=True)
    page = folder / "report.html"
    subprocess.run(
        [*fullrank, "report", *runs, "--out", str(page), "--title", "Plain attention and Mixhead B"], check=True
    )
    return page


def take(chromium: str, page: Path, out: Path, width: int, height: int, scale: int, scheme: str) -> None:
    """Photograph the top of a page as PNG with 128 colours.

    The page stands in a frame, as a window is never as narrow as a phone.
    """
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        png = Path(folder) / "page.png"
        size = f"width:{width}px;height:{height}px"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{page.resolve().as_uri()}" style="{size};border:0"></iframe>',
            encoding="utf-8",
        )
        command = f"{chromium} --headless --no-sandbox --disable-gpu --hide-scrollbars {OFFLINE}".split()
        command += [
            f"--user-data-dir={folder}/profile",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        ]
        command += [f"--force-device-scale-factor={scale}", f"--window-size={max(width, 600)},{height}"]
        subprocess.run([*command, f"--screenshot={png}", frame.as_uri()], check=True, capture_output=True)
        with Image.open(png) as picture:
            cut = picture.convert("RGB").crop((0, 0, width * scale, height * scale))
            cut.quantize(128).save(out, optimize=True)


def main() -> None:
    chromium = browser()
    page = make_report(Path(*sys.argv[1:2] or ("runs/pictures",)))
    for name, shot in PICTURES.items():
        take(chromium, page, HERE / f"{name}.png", *shot)


if __name__ == "__main__":
    main()
