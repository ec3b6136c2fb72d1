"""A book of one chapter, to see how it is built and what fails its build."""

import nbformat

from kvq_lib.course import site

CONFIG = """
title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: cache}
launch_buttons: {thebe: false}
sphinx: {extra_extensions: [kvq_lib.course.strict]}
"""
CELL = "exec(open('../kvq_lib/code.py').read())\nprint('the answer is', answer)"


def write_chapter(root, code, text="# A chapter"):
    chapter = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(text, id="title"),
            nbformat.v4.new_code_cell(code, id="code"),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(chapter, root / "book" / "chapter.ipynb")


def write_book(tmp_path):
    """A book of one chapter whose output comes from its library."""
    for folder in ("book", "kvq_lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/chapter\n")
    (tmp_path / "requirements.txt").write_text("numpy==2.0.0\n")
    (tmp_path / "kvq_lib" / "code.py").write_text("answer = 41\n")
    write_chapter(tmp_path, CELL)
    return tmp_path


def why(root, capsys):
    """What a build that must fail says of the reason."""
    assert site.build(root) == 1 and site.is_stale(root)
    return capsys.readouterr().out.split("The site was not built.")[1]


def shows(html):
    return f"from IPython.display import HTML\n\nHTML({html!r})"
