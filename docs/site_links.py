"""A hook of mkdocs: links to files of the repository that are no pages name the file instead.

On a forge such a link opens the file. The site has only the pages, and strict mode refuses links
to anything else.
"""

import re

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a page, for mkdocs."""
    return LINK.sub(named, markdown)


def named(link: re.Match[str]) -> str:
    """`[text](../path)` as text that names the path."""
    text, path = link[1], link[2].removeprefix("../").partition("#")[0]
    return text if path in text else f"{text} (`{path}`)"
