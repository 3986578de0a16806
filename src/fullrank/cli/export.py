"""The verb that turns a run into a folder of Hugging Face, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.options import Checkpoint, Json
from fullrank.cli.output import print_json
from fullrank.core.errors import InputError

_FORMATS = ("hf", "fullrank")


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples:  [cyan]fullrank export runs/demo/b --to hf exported/b[/cyan]   "
        "[cyan]fullrank export runs/demo/b --checkpoint last --to hf exported/b-last[/cyan]   "
        "[cyan]fullrank export exported/b --to fullrank models/b[/cyan] (back)",
    )(export)


def export(
    run: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run folder; with --to fullrank a folder that was exported.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not hold anything.")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="hf: a folder of Hugging Face; fullrank: what model.save writes."),
    ] = "hf",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> None:
    """Write a trained model as a folder that Hugging Face's `from_pretrained` reads, also without this package."""
    if to not in _FORMATS:
        raise InputError(f"--to: {' or '.join(_FORMATS)}, given '{to}'")
    if to == "fullrank" and checkpoint != "best":
        raise InputError("--checkpoint: goes with --to hf; an exported folder holds one model, leave it out")
    from fullrank.hf.export import export_run, import_folder

    found = export_run(run, out, checkpoint) if to == "hf" else import_folder(run, out)
    files = sorted(file.name for file in found.iterdir())
    if json:
        told = {"from": str(run), "to": to, "folder": str(found), "files": files}
        print_json(told | ({"checkpoint": checkpoint} if to == "hf" else {}))
        return
    print(f"{found}: {', '.join(files)}")
    if to == "hf":
        print("  Check README.md, the model card, and state a licence there before you publish it.")
