"""A hook of mkdocs: links to files of the repository that are no pages name the file instead.

On a forge such a link opens the file. The site has only the pages, and strict mode refuses links
to anything else.
"""

import functools
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """The text of a page, for mkdocs."""
    depth = page.file.src_uri.count("/")
    return LINK.sub(functools.partial(named, depth), markdown)


def named(depth: int, link: re.Match[str]) -> str:
    """`[text](../path)` as text that names the path, where it leads out of the pages' folder.

    `depth` is the number of folders that the page is in.
    """
    text, up, path = link[1], link[2], link[3].partition("#")[0]
    if up.count("../") <= depth:
        return link[0]
    return text if path in text else f"{text} (`{path}`)"
