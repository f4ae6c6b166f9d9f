"""Hook of MkDocs: a notebook becomes a page, with the outputs that are stored in it. Nothing is executed."""

from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter


def on_files(files: Files, *, config: Any) -> Files:
    """Add a Markdown page and its pictures for each notebook; the notebook itself stays, for download."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        folder, _, name = file.src_uri.removesuffix(".ipynb").rpartition("/")
        notebook = nbformat.reads(file.content_string, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": f"{name}-files"})
        text += f'\n\n<a href="../{name}.ipynb" download>Download this page as a notebook</a>\n'
        files.append(File.generated(config, f"{folder}/{name}.md", content=text))
        for path, content in resources["outputs"].items():
            files.append(File.generated(config, f"{folder}/{path}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to notebooks lead to their pages."""
    return markdown.replace(".ipynb)", ".md)")
