"""Make one training file and one held-out file from a folder of plain books: straight quotes, one paragraph a line.

    python examples/prepare_text.py --source FOLDER --output_dir runs/text

The last hundredth of every book is kept out of training; held_out.txt has the first 12,000 characters of each.
"""

import argparse
import re
from pathlib import Path

STRAIGHT = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\t": " ", "\r": None, "\ufeff": None}
)
HELD_OUT_SHARE = 0.01
HELD_OUT_CHARACTERS = 12_000


def normalize(text: str) -> str:
    """Straight punctuation, no verse numbers, hard-wrapped prose joined into one line a paragraph."""
    text = re.sub(r"(?m)^\d+ +", "", text.translate(STRAIGHT))
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    lines = [line for line in text.split("\n") if line.strip()]
    # prose is wrapped: most paragraphs have several lines, and most lines are nearly as long as the longest
    lengths = sorted(len(line) for line in lines)
    wrapped = len(lines) > 2 * len(paragraphs) and lengths[len(lengths) // 2] > 0.8 * lengths[-len(lengths) // 20]
    return "\n".join(" ".join(part.split()) for part in (paragraphs if wrapped else lines)) + "\n"


def split(name: str, text: str) -> tuple[str, str]:
    """The training part and the held-out part, cut at the end of a line."""
    cut = text.find("\n", int(len(text) * (1 - HELD_OUT_SHARE)), len(text) - 1) + 1
    if cut == 0:
        raise ValueError(f"A book must have more than one line in its last hundredth, got {name} without.")
    return text[:cut], text[cut:]


def main(arguments: list[str] | None = None):
    """Read every .txt of the folder in order of name, write train.txt and held_out.txt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="Folder with .txt files.")
    parser.add_argument("--output_dir", required=True, help="Where train.txt and held_out.txt go.")
    args = parser.parse_args(arguments)
    files = sorted(Path(args.source).glob("*.txt"))
    if not files:
        raise ValueError(f"`source` must be a folder with .txt files, got {args.source!r}.")
    parts = [split(path.name, normalize(path.read_text(encoding="utf-8"))) for path in files]
    out = Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    train = "".join(part for part, _ in parts)
    held_out = "".join(part[:HELD_OUT_CHARACTERS].rstrip("\n") + "\n" for _, part in parts)
    (out / "train.txt").write_text(train, encoding="utf-8")
    (out / "held_out.txt").write_text(held_out, encoding="utf-8")
    print(f"{len(files)} books: {len(train):,} characters to train on, {len(held_out):,} held out")


if __name__ == "__main__":
    main()
