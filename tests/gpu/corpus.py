"""Packs text into the tokens that pretrain.py reads.

    python tests/gpu/corpus.py OUT.xz FOLDER... [--tokens 40e6]

The folders hold unpacked documentation packages (`apt-get download NAME`, `dpkg -x`) or sources:
the text of files that end in .html, .txt, .rst, .md, .gz (manual pages), .el and .py. A paragraph
that has occurred before is left out, so no page's header repeats and no held-out paragraph is in
the training part. A byte-pair vocabulary of GPT-2's size is learned from the text. Documents come
in random order. OUT.xz holds the tokens as little-endian u16. Needs `tokenizers`.
"""

import argparse
import gzip
import hashlib
import html
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 50_257
END = "<|endoftext|>"
SUFFIXES = {".html", ".htm", ".xhtml", ".txt", ".rst", ".md", ".el", ".py", ".gz", ".index"}
FEWEST, MOST = 200, 1_000_000  # characters of a document
HIDDEN = re.compile(r"(?is)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->")
BLOCK = re.compile(r"(?i)</?(p|div|li|ul|ol|h\d|tr|table|pre|dd|dt|dl|section|br)\b[^>]*>")
TAG = re.compile(r"<[^>]*>")
MANUAL = re.compile(r"(?m)^[.'].*$\n?|\\f.|\\&|\\s[-+]?\d")


def documents(folders: list[Path]) -> Iterator[str]:
    seen: set[bytes] = set()
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
            text = "\n\n".join(new(paragraphs(path), seen))
            if FEWEST <= len(text) <= MOST:
                yield text


def paragraphs(path: Path) -> list[str]:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    text = data.decode(errors="ignore")
    if "html" in path.suffix or path.suffix == ".htm" or text[:15].lower().startswith("<!doctype"):
        text = html.unescape(TAG.sub("", BLOCK.sub("\n\n", HIDDEN.sub("", text))))
    elif text.startswith((".", "'")):
        text = MANUAL.sub("", text)
    return [p.strip("\n") for p in re.split(r"\n[ \t]*\n", text)]


def new(found: list[str], seen: set[bytes]) -> Iterator[str]:
    for paragraph in found:
        digest = hashlib.blake2b(paragraph.split().__repr__().encode(), digest_size=8).digest()
        if paragraph.strip() and digest not in seen:
            seen.add(digest)
            yield paragraph


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--tokens", type=float, default=40e6, help="at most")
    arguments = parser.parse_args()

    from tokenizers import ByteLevelBPETokenizer

    texts = list(documents(arguments.folders))
    random.Random(0).shuffle(texts)
    print(f"{len(texts):,} documents, {sum(map(len, texts)):,} characters", flush=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts[::4], vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    print(f"{tokenizer.get_vocab_size():,} tokens in the vocabulary", flush=True)
    parts, count = [], 0
    for at in range(0, len(texts), 1000):
        for encoding in tokenizer.encode_batch(texts[at : at + 1000]):
            parts.append(np.array([*encoding.ids, 0], "<u2"))
            count += len(parts[-1])
        if count >= arguments.tokens:
            break
    tokens = np.concatenate(parts)[: int(arguments.tokens)]
    arguments.out.write_bytes(lzma.compress(tokens.tobytes(), preset=6))
    print(f"{len(tokens):,} tokens, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
