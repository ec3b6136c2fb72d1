"""How the site is built, and what fails a build."""

import threading
import urllib.error
import urllib.request

import pytest
import yaml
from tinybook import CELL, shows, why, write_chapter

from kvq_lib.course import blame, site


def shown(root):
    return (root / "_build" / "html" / "book" / "chapter.html").read_text()


def test_a_build_is_skipped_or_repeated_as_it_should_be(tiny, capsys):
    assert site.build(tiny) == 0
    assert "the answer is 41" in shown(tiny)
    assert capsys.readouterr().out.rstrip().endswith("_build/html/index.html")

    assert site.build(tiny) == 0
    again = capsys.readouterr().out
    assert "Nothing has changed" in again and "reading sources" not in again
    assert again.rstrip().endswith("_build/html/index.html")

    # Only the text changed: the page is new, its output comes from the cache.
    write_chapter(tiny, CELL, text="# A better title")
    assert site.build(tiny) == 0
    assert "A better title" in shown(tiny)
    assert "Executing notebook" not in capsys.readouterr().out

    (tiny / "kvq_lib" / "code.py").write_text("answer = 42\n")
    assert site.build(tiny) == 0
    assert "the answer is 42" in shown(tiny)
    assert "all chapters run again" in capsys.readouterr().out


def test_a_failing_cell_fails_the_build_and_is_named(tiny, capsys):
    write_chapter(tiny, "scale = 0\n15 / scale")
    for _ in range(2):  # a second try must not pass for want of anything to do
        report = why(tiny, capsys)
        assert "book/chapter.ipynb, cell 2 ('scale = 0') failed" in report
        assert "15 / scale" in report and "ZeroDivisionError" in report


FIGURE = """import base64
from IPython.display import Image
{comment}
Image(base64.b64decode("{png}"))"""
DOT = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


def test_a_picture_without_words_fails_the_build_and_is_named(tiny, capsys):
    write_chapter(tiny, FIGURE.format(comment="", png=DOT))
    report = why(tiny, capsys)
    assert "book/chapter.ipynb, cell 2 ('import base64'), line 1: WARNING" in report
    assert "a picture without alt text" in report


def test_a_picture_in_the_text_needs_words_too(tiny, capsys):
    import base64

    (tiny / "book" / "dot.png").write_bytes(base64.b64decode(DOT))
    write_chapter(tiny, CELL, text="# A chapter\n\nLook:\n\n![](dot.png)")
    report = why(tiny, capsys)
    assert "book/chapter.ipynb, cell 1 ('# A chapter'), line 5" in report
    assert "a picture without alt text" in report
    write_chapter(tiny, CELL, text="# A chapter\n\nLook:\n\n![A dot.](dot.png)")
    assert site.build(tiny) == 0


@pytest.mark.parametrize(
    "text", ["See {ref}`nowhere`.", "See [it](nowhere).", "See [it](chapter#nowhere)."]
)
def test_a_dead_link_in_the_text_fails_the_build_each_time(tiny, capsys, text):
    write_chapter(tiny, CELL, text=f"# A chapter\n\n{text}")
    for _ in range(2):
        report = why(tiny, capsys)
        assert "nowhere" in report
        assert "book/chapter.ipynb, cell 1 ('# A chapter'), line 3: WARNING" in report


def test_a_dead_link_of_a_cell_fails_the_build_and_is_named(tiny, capsys):
    write_chapter(tiny, shows("<a href='nowhere.html'>a page</a>"))
    report = why(tiny, capsys)
    assert "book/chapter.ipynb, cell 2 ('from IPython" in report
    assert "a dead link: nowhere.html leads to no page" in report


def test_a_link_to_no_place_of_a_page_fails_the_build(tiny, capsys):
    write_chapter(tiny, shows("<a href='chapter.html#nowhere'>a place</a>"))
    report = why(tiny, capsys)
    assert "book/chapter.ipynb, cell 2 ('from IPython" in report
    assert "): chapter.html#nowhere" in report
    write_chapter(tiny, shows("<a href='chapter.html#a-chapter'>a place</a>"))
    assert site.build(tiny) == 0


def test_an_edition_leaves_its_parts_out_and_no_trace_of_them(tiny):
    (tiny / "solutions").mkdir()
    (tiny / "solutions" / "one.md").write_text("# Answers\n\nThe word is xylophone.\n")
    (tiny / "book" / "two.md").write_text("# Another page\n")
    toc = {
        "format": "jb-book",
        "root": "book/chapter",
        "parts": [
            {"caption": "Chapters", "chapters": [{"file": "book/two"}]},
            {"caption": "Solutions", "chapters": [{"file": "solutions/one"}]},
        ],
    }
    (tiny / "_toc.yml").write_text(yaml.safe_dump(toc))
    assert site.build(tiny) == 0 and not site.is_stale(tiny)
    html = tiny / "_build" / "html"
    told = [
        p for p in html.rglob("*") if p.is_file() and b"xylophone" in p.read_bytes()
    ]
    assert len(told) >= 2  # the page, and the search index

    assert site.is_stale(tiny, "course")
    assert site.build(tiny, edition="course") == 0 and "answer is 41" in shown(tiny)
    for path in html.rglob("*"):
        assert not (path.is_file() and b"xylophone" in path.read_bytes()), path
    assert site.is_stale(tiny) and not site.is_stale(tiny, "course")


def test_a_script_from_another_host_fails_the_build_and_is_named(tiny, capsys):
    write_chapter(tiny, shows("<script async src='https://cdn.example/a.js'></script>"))
    report = why(tiny, capsys)
    assert "book/chapter.ipynb, cell 2 ('from IPython" in report
    assert "loads https://cdn.example/a.js from another host" in report


def test_a_page_that_loads_from_another_host_fails_without_a_cell(tiny, capsys):
    config = tiny / "_config.yml"
    config.write_text(
        config.read_text().replace(
            "sphinx: {", "sphinx: {config: {html_js_files: ['//cdn.example/a.js']}, "
        )
    )
    report = why(tiny, capsys)
    assert "book/chapter.html: //cdn.example/a.js" in report


def test_outside_links_are_listed_in_one_report(tiny):
    text = "# A chapter\n\n[one](https://a.example/x) <https://b.example>"
    write_chapter(tiny, CELL, text=text)
    assert site.build(tiny) == 0
    listed = dict(
        line.split("  ") for line in (tiny / site.OUTSIDE).read_text().splitlines()
    )
    assert listed["https://a.example/x"] == "book/chapter.html"
    assert "https://b.example" in listed


@pytest.mark.parametrize(
    "path",
    [
        "kvq_lib/new.py",
        "kvq_lib/course/explorer.js",
        "kvq_lib/course/explorer.css",
        "kvq_lib/course/explorer.html",
        "requirements.txt",
        "book/results/quality.json",
        "book/questions/02_memory.yml",
    ],
)
def test_what_outputs_depend_on_changes_the_execution_key(tiny, path):
    before = site.execution_key(tiny)
    (tiny / path).parent.mkdir(parents=True, exist_ok=True)
    (tiny / path).write_text("changed")
    assert site.execution_key(tiny) != before


@pytest.mark.parametrize(
    "path",
    [
        "homework/grade.py",
        "publish/watch.py",
        "browser.py",
        "colab_check.py",
        "light.py",
        "scan.py",
        "scan_page.py",
        "fatal.py",
        "pdf.py",
        "pdf.css",
        "pdf_document.py",
    ],
)
def test_what_only_surrounds_the_chapters_changes_none(tiny, path):
    before = site.execution_key(tiny)
    (tiny / "kvq_lib/course" / path).parent.mkdir(parents=True, exist_ok=True)
    (tiny / "kvq_lib/course" / path).write_text("changed")
    assert site.execution_key(tiny) == before
    module = "course." + path.split(".")[0].split("/")[0]
    chapters = (site.ROOT / "book").glob("*.ipynb")
    assert not any(module in p.read_text(encoding="utf-8") for p in chapters)


def test_prose_and_configuration_make_only_the_site_stale(tiny):
    execution, whole = site.execution_key(tiny), site.site_key(tiny)
    for name in ("_config.yml", "_toc.yml", "book/page.md"):
        (tiny / name).write_text("changed")
        assert site.site_key(tiny) != whole, name
        whole = site.site_key(tiny)
    assert site.execution_key(tiny) == execution


def test_an_address_that_does_not_exist_gets_the_site_s_own_page(tmp_path):
    (tmp_path / "404.html").write_text("<h1>Not here</h1>")
    with site.make_server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/a/b.html")
        assert caught.value.code == 404 and b"Not here" in caught.value.read()
        server.shutdown()


def test_a_warning_that_names_no_cell_stays_as_it_is(tiny):
    for warning in (
        f"{tiny}/book/page.md:12: WARNING: x",
        f"{tiny}/book/chapter.ipynb:12: WARNING: x",
        "/elsewhere/book/chapter.ipynb:20001: WARNING: x",
        "WARNING: x",
    ):
        assert blame.with_cell(tiny, warning) == warning


def test_links_are_checked_and_the_broken_ones_named(tiny, capsys):
    (tiny / "here.html").write_text("a page")
    with site.make_server(tiny, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        text = f"# A chapter\n\n[one]({here}/here.html) [two]({here}/gone.html)"
        write_chapter(tiny, CELL, text=text)
        assert site.check_links(tiny) == 1
        server.shutdown()
    said = capsys.readouterr().out
    assert "2 links, 1 without an answer" in said
    assert f"cell 1 ('# A chapter'), line 3: {here}/gone.html (404" in said


def test_serving_a_taken_port_says_what_to_do(tiny, capsys):
    html = tiny / "_build" / "html"
    html.mkdir(parents=True)
    (html / "index.html").write_text("a page")
    with site.make_server(html, 0) as server:
        assert site.serve(tiny, server.server_port) == 1
    assert "make serve PORT=" in capsys.readouterr().out
