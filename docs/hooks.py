"""mkdocs hooks: the README is the first page, figures are pages, `::: name` in api.md becomes what it documents."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import meshweave as mw

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what does not lie in docs/: the README and the tables of figures."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for table in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        files.append(File.generated(config, f"results/{table.name}", abs_src_path=str(table)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links of the repository's files at pages of the site; a file that is no page becomes text."""
    source = Path(page.file.abs_src_path).resolve().parent
    depth = page.file.src_uri.count("/")

    def pointed(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        file = (source / target).resolve()
        if file.parent == ROOT / "benchmarks" / "results" and file.suffix == ".md":
            return f"[{text}]({'../' * depth}results/{file.name}{anchor})"
        if file.is_relative_to(ROOT / "docs"):
            return f"[{text}]({'../' * depth}{file.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        return f"{text} (`{file.relative_to(ROOT).as_posix()}`)"

    markdown = re.sub(
        r"^::: (\w+)$",
        lambda match: "\n".join(_described(match.group(1), getattr(mw, match.group(1)))),
        markdown,
        flags=re.M,
    )
    markdown = re.sub(r"!\[([^\]]*)\]\(docs/", r"![\1](", markdown)
    return _LINK.sub(pointed, markdown)


def _described(name: str, thing: Any, level: int = 3) -> Iterator[str]:
    """A heading, the signature and the docstring; of a class its public methods, too.

    mkdocstrings cannot do this: `meshweave.cost.simulate` and others are functions with the name of a package.
    """
    yield f"{'#' * level} {name}\n"
    try:
        signature = _plain(str(inspect.signature(thing)))
    except ValueError:  # an exception class, of no signature
        signature = ""
    if signature and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        yield f"```python\n{name.rpartition('.')[2]}{_wrapped(signature)}\n```\n"
    text = inspect.getdoc(thing) or ""
    text = "" if text.startswith(f"{name}(") else text  # what dataclasses write of themselves
    yield re.sub(r"^(\w[\w, ]{0,40}): ", r"\n- **\1**: ", text, flags=re.M) + "\n"
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            described = inspect.unwrap(member.__func__ if isinstance(member, (classmethod, staticmethod)) else member)
            if key.startswith("_") or not (inspect.isfunction(described) and described.__doc__):
                continue
            yield from _described(f"{name}.{key}", described, level + 1)


def _plain(signature: str) -> str:
    """Without quotes around annotations, module paths and addresses of functions."""
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    return re.sub(r"<function [^>]*(<lambda>)?[^>]* at 0x\w+>", "...", signature).replace("meshweave.", "")


def _wrapped(signature: str) -> str:
    """One parameter a line where the signature is long."""
    if len(signature) < 100:
        return signature
    depth, lines, line = 0, [], ""
    for char in signature:
        depth += (char in "([{") - (char in ")]}")
        line += char
        if (char == "," and depth == 1) or (char == "(" and depth == 1):
            lines.append(line.strip())
            line = ""
    head, *rest = lines
    last, _, returns = line.rpartition(") ->")
    return "\n".join([head, *(f"    {part}" for part in (*rest, last.strip())), f") ->{returns}"])
